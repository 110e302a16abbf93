import random
from dataclasses import replace
from itertools import islice

from models.pretrain.loop import Row
from models.words import NAME_CLASSES
from models.worlds import StreamSettings, _Names, rows
from tests.models.test_words import tokenizer

SMALL = StreamSettings(seed=3, questions=12, uses=2, lists=(0.5, 0.1), constant_after=20)


def test_the_stream_is_fixed_and_its_rows_have_no_unknown_word_and_targets_that_end():
    first = list(islice(rows(tokenizer(), SMALL), 80))
    assert first == list(islice(rows(tokenizer(), SMALL), 80))
    assert first != list(islice(rows(tokenizer(), replace(SMALL, seed=4)), 80))
    end, unknown = tokenizer().eos_token_id, tokenizer().unk_token_id
    for row in first:
        assert unknown not in row.prompt
        assert row.targets
        assert all(target[-1] == end and len(target) > 1 for target in row.targets)
        assert len(row) < 1024


def test_a_name_part_is_exchanged_for_the_same_one_of_its_class_everywhere():
    texts = ("ada keller is an artist born in norwick. ada boris", "ada keller city")
    prompt, target = (tuple(tokenizer()(text)["input_ids"]) for text in texts)
    other = _Names(tokenizer()).exchanged(Row(prompt, (target,)), random.Random(0))
    words, query = (tokenizer().convert_ids_to_tokens(list(ids)) for ids in (other.prompt, other.targets[0]))
    assert [any(word == name.lower() for name in NAME_CLASSES[i]) for i, word in enumerate(words[:2])] == [True, True]
    assert words[2:7] == ["is", "an", "artist", "born", "in"]
    assert words[9] == words[0] != words[10]
    assert query == [*words[:2], "city"]
