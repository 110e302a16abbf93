"""Values between the stages: what they derive from what they hold."""

import json

import pytest

from leret.core.types import Failure, Passage, Rollout, Task, digest, json_encoder, merge


def test_a_document_keeps_its_best_score_and_ties_the_order_of_arrival():
    a, b, c = (Passage(name, "", "", score) for name, score in (("a", 1.0), ("b", 2.0), ("c", 2.0)))
    better = a._replace(score=3.0)
    assert merge([(b, a), (c, b), (better,)]) == (better, b, c)


@pytest.mark.parametrize("options", [{}, {"sort_keys": True}, {"ensure_ascii": False, "separators": (",", ":")}])
def test_an_encoder_writes_what_json_dumps_does(options):
    encode = json_encoder(**options)
    for value in ("\xe4\ud800", 1.5, None, float("nan"), (1, [2e-7]), {"b": {"\u20ac": True}, "a": ()}):
        assert encode(value) == json.dumps(value, **options)
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode([object()])


def test_a_digest_takes_half_a_surrogate_pair_and_tells_types_apart():
    assert len({digest("\ud800"), digest("1"), digest(1), digest(["1"])}) == 4


@pytest.mark.parametrize(
    ("inputs", "text"), [({"claim": "x"}, "x"), ({"a": "x", "b": 1}, '{"a":"x","b":1}'), ({"n": 2}, '{"n":2}')]
)
def test_a_task_reads_as_its_only_text_or_as_json(inputs, text):
    assert Task("t", inputs).text == text


def test_a_task_is_solved_where_its_gold_leads():
    task = Task("t", {}, ("a", "b"))
    assert [task.is_solved_by(ids) for ids in ("bax", "axb", "a")] == [True, False, False]
    assert not Task("t", {}).is_solved_by("a")


def test_what_does_not_parse_is_the_policys_result_and_an_outage_is_none():
    failures = [None, Failure("parse", "away"), Failure("policy", "away")]
    rollouts = [Rollout("t", (), failure is None, failure) for failure in failures]
    assert [(one.unparsed, one.error) for one in rollouts] == [(False, None), (True, None), (False, "policy: away")]
