import json

import pytest

from leret.core.types import Passage, Task, digest, json_encoder, merge


def test_merge_keeps_best_scores_and_order_of_ties():
    a, b, c = (Passage(name, "", "", score) for name, score in (("a", 1.0), ("b", 2.0), ("c", 2.0)))
    better = a._replace(score=3.0)
    assert merge([(b, a), (c, b), (better,)]) == (better, b, c)


@pytest.mark.parametrize("options", [{}, {"sort_keys": True}, {"ensure_ascii": False, "separators": (",", ":")}])
def test_encoder_equals_json_dumps(options):
    encode = json_encoder(**options)
    for value in ("\xe4\ud800", 1.5, None, float("nan"), (1, [2e-7]), {"b": {"\u20ac": True}, "a": ()}):
        assert encode(value) == json.dumps(value, **options)
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode([object()])


def test_digest_distinguishes_types_and_takes_surrogates():
    assert len({digest("\ud800"), digest("1"), digest(1), digest(["1"])}) == 4


def test_a_task_is_solved_if_its_gold_or_their_chunks_lead():
    task = Task("t", {}, ("a", "b"))
    assert [task.is_solved_by(ids) for ids in ("bax", "axb", "a")] == [True, False, False]
    assert not Task("t", {}).is_solved_by("a")

    task = Task("t", {}, ("a", "b"), parents={"a#0": "a", "a#1": "a", "b#0": "b", "x#0": "x"})
    assert list(task.gold_ids(["x#0", "a#1", "b#0", "a#0"])) == ["x", "a", "b"]
    rankings = (["b#0", "a#1", "x#0"], ["a#0", "a#1", "b#0"], ["a#0", "x#0", "b#0"])
    assert [task.is_solved_by(ids) for ids in rankings] == [True, True, False]
