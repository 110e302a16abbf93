"""Values between the stages: what they derive from what they hold."""

import pytest

from leret.core.types import Failure, Hop, Passage, Rollout, Task, digest, merge


def test_a_document_keeps_its_best_score_and_ties_the_order_of_arrival():
    a, b, c = (Passage(name, "", "", score) for name, score in (("a", 1.0), ("b", 2.0), ("c", 2.0)))
    better = a._replace(score=3.0)
    assert merge([(b, a), (c, b), (better,)]) == (better, b, c)


def test_a_digest_takes_half_a_surrogate_pair_and_tells_types_apart():
    assert len({digest("\ud800"), digest("1"), digest(1), digest(["1"])}) == 4


@pytest.mark.parametrize(
    ("inputs", "text"), [({"claim": "x"}, "x"), ({"a": "x", "b": 1}, '{"a":"x","b":1}'), ({"n": 2}, '{"n":2}')]
)
def test_a_task_reads_as_its_only_text_or_as_json(inputs, text):
    assert Task("t", inputs).text == text


@pytest.mark.parametrize(("ids", "solved"), [(["b", "a", "x"], True), (["a", "x", "b"], False), (["a"], False)])
def test_a_task_is_solved_where_its_gold_leads(ids, solved):
    assert Task("t", {}, ("a", "b")).is_solved_by(ids) is solved
    assert not Task("t", {}).is_solved_by(ids)


@pytest.mark.parametrize(
    ("outputs", "query"), [(None, None), ({"reasoning": "r", "query": "q"}, "q"), ({"queries": ["a", "b"]}, "a b")]
)
def test_the_last_output_is_the_query(outputs, query):
    assert Hop("p", {}, (), "text", outputs, ()).query == query


@pytest.mark.parametrize(
    ("kind", "unparsed", "error"), [(None, False, None), ("parse", True, None), ("policy", False, "policy: away")]
)
def test_what_does_not_parse_is_the_policys_result_and_an_outage_is_none(kind, unparsed, error):
    rollout = Rollout("t", (), kind is None, kind and Failure(kind, "away"))
    assert (rollout.unparsed, rollout.error) == (unparsed, error)
