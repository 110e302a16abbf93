from dataclasses import replace
from functools import cache
from itertools import islice

from models import agent, words
from models.worlds import StreamSettings, rows

SMALL = StreamSettings(seed=3, questions=12, uses=2, lists=(0.5, 0.1), constant_after=20)


@cache
def tokenizer():
    return words.build_tokenizer()


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


def test_rows_of_agents_are_fixed_have_no_unknown_word_to_write_and_fit():
    assert agent.vocabulary()[: len(words.vocabulary())] == words.vocabulary()
    speaker = words.build_tokenizer(agent.vocabulary())
    made = agent.agent_rows(speaker, 7, StreamSettings(seed=3, questions=12))
    assert made == agent.agent_rows(speaker, 7, StreamSettings(seed=3, questions=12))
    end, unknown = speaker.eos_token_id, speaker.unk_token_id
    for row in made:
        assert len(row.prompt) < 900
        assert all(target[-1] == end and len(target) > 1 and unknown not in target for target in row.targets)
