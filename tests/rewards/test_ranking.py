import math
import random
from dataclasses import replace

import ir_measures
import pytest

from leret.core.errors import ConfigError
from leret.core.types import Outcome, Passage, Task
from leret.rewards import REWARDS, ranking, scoring

RANKING = ["recall", "ap", "rr", "ndcg", "success", "all_found", "fact_em", "fact_f1"]


def outcome(doc_ids, gold):
    task = Task.question("q", "?", gold=tuple(gold), relevance=gold if isinstance(gold, dict) else {})
    return Outcome(task, ranking=tuple(Passage(i, "", "", 0.0) for i in doc_ids))


def test_a_document_counts_once_and_all_found_needs_all():
    assert {name: scoring(name)(outcome("aab", "ab")) for name in ("recall", "ap")} == {"recall": 1, "ap": 1}
    assert [scoring("all_found")(outcome(found, "ab")) for found in ("axb", "xya")] == [1, 0]
    assert {scoring(name)(outcome("", "ab")) for name in RANKING} == {0}


@pytest.mark.parametrize(
    ("found", "deep", "value"),
    [
        ("ab", ["xa"], 1),
        ("ax", ["xb"], (1 + 1 / 2) / 2),  # b is the first that is not retrieved yet
        ("xy", ["xyzba"], (1 / (1 + math.log2(3)) + 1 / (1 + math.log2(4))) / 2),
        ("xy", ["za", "bz"], (1 / (1 + math.log2(3)) + 1 / 2) / 2),  # the better place of two queries
        ("xy", ["pqa"], 0),  # below the depth
        ("ax", [], 1 / 2),  # outside sampling
    ],
)
def test_deep_recall_counts_the_places_of_missing_documents(found, deep, value):
    reached = replace(outcome(found, "ab"), deep=tuple(map(tuple, deep)))
    depth = 2 if value == 0 else 100
    assert REWARDS["deep_recall"](reached, depth=depth) == pytest.approx(value)
    assert (scoring("deep_recall").depth, scoring("recall").depth) == (100, 0)
    assert REWARDS["deep_recall"](replace(reached, task=Task.question("q", "?"))) is None


def test_ranking_without_gold_has_no_value():
    for name in RANKING:
        assert REWARDS[name](outcome("a", ())) is None
        with pytest.raises(ValueError, match="gold is empty"):
            getattr(ranking, name)(["a"], ())


ORACLES = {"ap": "AP", "recall": "R", "rr": "RR", "ndcg": "nDCG", "success": "Success"}


@pytest.mark.parametrize("name", ["ap", "ap@3", "recall@3", "rr", "ndcg", "ndcg@4", "success@2"])
def test_measures_equal_ir_measures_on_random_rankings(name):
    base, at, k = name.partition("@")
    oracle, rng = ir_measures.parse_measure(ORACLES[base] + at + k), random.Random(0)
    for _ in range(60):
        found = rng.sample("abcdefghij", rng.randint(1, 8))
        gold = {doc: rng.randint(1, 3) for doc in rng.sample("abcdefghijklm", rng.randint(1, 4))}
        run = [ir_measures.ScoredDoc("q", doc, -float(rank)) for rank, doc in enumerate(found)]
        qrels = [ir_measures.Qrel("q", doc, grade) for doc, grade in gold.items()]
        [expected] = ir_measures.iter_calc([oracle], qrels, run)
        assert scoring(name)(outcome(found, gold)) == pytest.approx(expected.value)


@pytest.mark.parametrize("name", ["map", "recall@", "recall@0", "@3", "steps@3", "recall@²", "recall@٣"])
def test_unknown_name_is_refused_with_the_available_ones(name):
    with pytest.raises(ConfigError, match=r"sampling.reward: unknown measure .*available: recall, deep_recall, ap"):
        scoring(name, "sampling.reward")


def test_rewards_count_parents_in_place_of_chunks():
    chunks = {"a#0": "a", "a#1": "a", "b#0": "b", "x#0": "x", "x#1": "x"}
    found = outcome(("x#0", "x#1", "a#1", "a#0", "b#0"), "ab")
    found = replace(found, task=replace(found.task, parents=chunks))
    by_hand = {"recall": 1, "recall@2": 1 / 2, "ap": (1 / 2 + 2 / 3) / 2, "fact_f1": 4 / 5, "deep_recall": 1}
    assert {name: scoring(name)(found) for name in by_hand} == pytest.approx(by_hand)
    deep = replace(found, ranking=found.ranking[:2], deep=(("a#0", "a#1", "x#0", "b#0"),))
    assert REWARDS["deep_recall"](deep) == pytest.approx((1 / 2 + 1 / (1 + math.log2(3))) / 2)
