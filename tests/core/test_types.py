"""Values that pass between the stages, by hand."""

import pytest

from leret.core.types import Hop, Passage, Task, digest, merge


def test_a_digest_follows_from_the_values_not_from_their_order_or_place():
    assert digest("q1", {"b": 1, "a": [2]}) == digest("q1", {"a": [2], "b": 1})
    assert digest("q", "1") != digest("q1")
    assert digest("\ud800") != digest("?")


def test_merged_rankings_keep_the_best_score_and_the_order_of_ties():
    rankings = [[("a", 2.0), ("b", 1.0)], [("c", 2.0), ("b", 3.0), ("a", 1.0)]]
    found = merge([[Passage(name, "", "", score) for name, score in ranking] for ranking in rankings])
    assert [(p.doc_id, p.score) for p in found] == [("b", 3.0), ("a", 2.0), ("c", 2.0)]


@pytest.mark.parametrize(
    ("gold", "found", "solved"),
    [("ab", "bax", True), ("ab", "axb", False), ("ab", "a", False), ("", "a", False), ("", "", False)],
)
def test_a_task_is_solved_where_all_gold_leads(gold, found, solved):
    assert Task.question("q", "?", gold=gold).is_solved_by(list(found)) is solved


def test_a_task_of_one_text_is_that_text():
    assert Task.question("q", "who").text == "who"
    assert Task("q", {"a": "who", "b": 1}).text == '{"a":"who","b":1}'


@pytest.mark.parametrize(
    ("outputs", "query"), [({"reasoning": "r", "query": "q"}, "q"), ({"ids": [1, "x"]}, "1 x"), ({}, None)]
)
def test_the_query_of_a_hop_is_its_last_output(outputs, query):
    assert Hop("p", {}, (), None, outputs, ()).query == query
