"""Measures of a ranking: by hand, and against ir_measures."""

import random

import ir_measures
import pytest

from leret.core.types import Outcome, Passage, Task
from leret.rewards import REWARDS, reward
from leret.rewards.ranking import all_found, ap, ndcg, recall, rr, success

GOLD = {"a", "b"}


def outcome(doc_ids, gold):
    task = Task.question("q", "?", gold=tuple(gold), relevance=gold if isinstance(gold, dict) else None)
    return Outcome(task, ranking=tuple(Passage(i, "", "", 0.0) for i in doc_ids))


@pytest.mark.parametrize(
    ("doc_ids", "by_hand"),
    [
        (["a", "x", "b"], {"recall": 1, "ap": (1 / 1 + 2 / 3) / 2, "rr": 1, "success": 1, "all_found": 1}),
        (["x", "y", "a"], {"recall": 1 / 2, "ap": (1 / 3) / 2, "rr": 1 / 3, "success": 1, "all_found": 0}),
        (["b", "a"], {"recall": 1, "ap": 1, "rr": 1, "ndcg": 1, "success": 1, "all_found": 1}),
        (["x"], {"recall": 0, "ap": 0, "rr": 0, "ndcg": 0, "success": 0, "all_found": 0}),
        (["a", "a", "b"], {"recall": 1, "ap": 1}),  # a document found twice counts once
        ([], {"recall": 0, "ap": 0, "rr": 0, "ndcg": 0, "success": 0, "all_found": 0}),
    ],
)
def test_by_hand(doc_ids, by_hand):
    for name, value in by_hand.items():
        assert REWARDS[name](outcome(doc_ids, GOLD)) == pytest.approx(value), name


def test_no_gold_is_no_value():
    for value in (recall, ap, rr, ndcg, success, all_found):
        with pytest.raises(ValueError, match="without gold"):
            value(["a"], ())


ORACLES = {
    "ap": ir_measures.AP,
    "ap@3": ir_measures.AP @ 3,
    "recall@3": ir_measures.R @ 3,
    "rr": ir_measures.RR,
    "ndcg": ir_measures.nDCG,
    "ndcg@4": ir_measures.nDCG @ 4,
    "success@2": ir_measures.Success @ 2,
}


def test_equal_to_ir_measures_on_random_rankings():
    rng = random.Random(0)
    run, qrels, cases = [], [], {}
    for i in range(60):
        query_id = f"q{i}"
        ranking = rng.sample("abcdefghij", rng.randint(1, 8))
        gold = {doc: rng.randint(1, 3) for doc in rng.sample("abcdefghijklm", rng.randint(1, 4))}
        cases[query_id] = (ranking, gold)
        run += [ir_measures.ScoredDoc(query_id, doc, -float(rank)) for rank, doc in enumerate(ranking)]
        qrels += [ir_measures.Qrel(query_id, doc, grade) for doc, grade in gold.items()]
    names = {oracle: name for name, oracle in ORACLES.items()}
    n_compared = 0
    for metric in ir_measures.iter_calc(list(ORACLES.values()), qrels, run):
        assert reward(names[metric.measure])(outcome(*cases[metric.query_id])) == pytest.approx(metric.value)
        n_compared += 1
    assert n_compared == 60 * len(ORACLES)
