import pytest

from leret.core.types import Sample, State, Task
from leret.rollouts.facts import word_facts


def group(id, *texts, field="reply"):
    state = State(f"s{id}", id, 0, "reply", {}, ())
    return state, [Sample(f"{id}{i}", state.id, id, 0, "0", i, i, text, {field: text}) for i, text in enumerate(texts)]


TASKS = [Task("a", {}, answers=("one two three four", "one")), Task("b", {}, answers=("x y",)), Task("c", {})]


def test_words_of_a_round_are_compared_with_each_other_and_with_the_references():
    groups = [group("a", "one two", "ONE"), group("b", "x x x x"), group("c", "not counted")]
    facts = word_facts(groups, TASKS, replies=True)
    assert facts["completions/distinct_1"] == pytest.approx(5 / 8)
    assert facts["completions/length_ratio"] == pytest.approx((2 + 1 + 4) / (1 + 1 + 2))


def test_lengths_count_only_where_one_text_is_the_reply():
    assert "completions/length_ratio" not in word_facts([group("a", "one")], TASKS, replies=False)
    assert "completions/length_ratio" not in word_facts([group("c", "one")], TASKS, replies=True)
    assert word_facts([], TASKS, replies=True) == {}
