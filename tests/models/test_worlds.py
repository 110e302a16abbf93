import random
from dataclasses import replace
from functools import cache
from itertools import islice

import torch

from leret.core.types import Passage
from leret.datasets.world.generate import generate
from models.pretrain.examples import call_messages, prompt_ids
from models.pretrain.loop import Row
from models.words import NAME_CLASSES, SPECIAL, build_model, build_tokenizer
from models.worlds import StreamSettings, _Names, rows

SMALL = StreamSettings(seed=3, questions=12, uses=2, lists=(0.5, 0.1), constant_after=20)


@cache
def tokenizer():
    return build_tokenizer()


@cache
def model():
    return build_model(len(tokenizer()), seed=0)


def ids(text):
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


def test_every_text_of_other_worlds_is_in_the_vocabulary():
    unknown = tokenizer().unk_token_id
    documents, questions = generate(41, 100, 20, 100, three_hop=0.3)
    texts = [f"{d.title} | {d.text}" for d in documents] + [q.text for q in questions]
    assert [text for text in texts if unknown in ids(text)] == []


def test_a_prompt_is_a_token_prefix_of_the_conversation_which_ends_in_the_end_token():
    found = (Passage("b", "Ada Keller", "Ada Keller is a writer born in 1931 in Norwick.", 1.0),)
    demos = [{"question": "Which film is older?", "query": "film year"}]
    messages = call_messages("In which city was the director of The Golden Harbor born?", found, demos)
    answered = [*messages, {"role": "assistant", "content": "ada keller city"}]
    whole = ids(str(tokenizer().apply_chat_template(answered, tokenize=False)))
    assert whole == [*prompt_ids(tokenizer(), messages), *ids("ada keller city"), tokenizer().eos_token_id]


def test_a_fresh_model_says_what_followed_a_word_before():
    torch.manual_seed(0)
    names = torch.randint(len(SPECIAL), len(tokenizer()), (4, 60))
    twice = torch.cat([names, names], 1)
    with torch.no_grad():
        said = model()(twice).logits[:, 60:-1].argmax(-1)
    assert (said == names[:, 1:]).float().mean() > 0.85


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
