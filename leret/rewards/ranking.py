"""Measures of a ranking against the gold documents, and rewards made from them.

All measures are in [0, 1]; higher is better.

Relevance is binary, except that nDCG uses the grades of gold documents if the data have grades.

Arguments are the ranking's ids (best first), the gold ids, and a cut-off ``k``. A repeated document
counts at its first rank. Missing gold documents lower every measure except `rr` and `success`. If a
task has no gold documents, a measure raises ValueError, and its reward is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from leret.core.types import Outcome

_NO_GOLD = "gold is empty; measures need at least one gold document"

# minimum recall, reward
_TIERS = ((0.7, 5.0), (0.5, 4.0), (0.4, 3.0), (0.3, 1.0), (0.1, 0.5), (0.05, 0.1))

Measure = Callable[[Sequence[str], Collection[str], int | None], float]


def of_ranking(measure: Measure) -> Callable[[Outcome, int | None], float | None]:
    """Return the reward that applies a measure to an outcome's ranking.

    None if the task has no gold documents.
    """

    def value(outcome: Outcome, k: int | None = None) -> float | None:
        task = outcome.task
        gold = task.grades if task.relevance else task.gold
        if not gold:
            return None
        doc_ids = [passage.doc_id for passage in outcome.ranking]
        ids = task.gold_ids(doc_ids) if task.parents else doc_ids
        return measure(ids, gold, k)

    return value


def recall(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Return the share of the gold documents that are in the ranking.

    >>> recall(["a", "x"], {"a", "b"})
    0.5
    """
    gold_ids = set(gold)
    if not gold_ids:
        raise ValueError(_NO_GOLD)
    return len(gold_ids.intersection(doc_ids[:k])) / len(gold_ids)


def ap(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Return average precision: the mean precision at the ranks of gold documents.

    A missing document counts 0.

    >>> ap(["a", "x", "b"], {"a", "b"})  # (1/1 + 2/3) / 2
    0.8333333333333333

    Source: LeReT, section 4.2: sum over hits of (hits so far / rank), divided by the number of gold
    documents.
    """
    hits = _hits(doc_ids, gold, k)
    precisions = [n_hits / rank for n_hits, rank in enumerate(hits, 1)]
    return sum(precisions) / len(set(gold))


def rr(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Return the reciprocal rank of the first gold document, 0 if the ranking has none.

    >>> rr(["x", "a"], {"a", "b"})
    0.5
    """
    hits = _hits(doc_ids, gold, k)
    if not hits:
        return 0.0
    return 1 / hits[0]


def ndcg(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Return the discounted cumulative gain, divided by that of the ideal ranking.

    A hit gains grade / log2(rank + 1). Gold documents have grade 1, unless ``gold`` maps them to
    grades.

    >>> round(ndcg(["x", "a"], {"a"}), 4)  # (1 / log2 3) / (1 / log2 2)
    0.6309
    >>> round(ndcg(["x", "a"], {"a": 1, "b": 2}), 4)  # (1 / log2 3) / (2 / log2 2 + 1 / log2 3)
    0.2398

    Source: Järvelin and Kekäläinen (2002), with the discount of trec_eval.
    """
    grades = gold if isinstance(gold, Mapping) else dict.fromkeys(gold, 1)
    ranking = list(dict.fromkeys(doc_ids[:k]))
    hits = [(rank, grades[ranking[rank - 1]]) for rank in _hits(doc_ids, gold, k)]
    best_grades = sorted(grades.values(), reverse=True)
    ideal = list(enumerate(best_grades, 1))[:k]
    return _gain(hits) / _gain(ideal)


def success(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Return 1 if the ranking has any gold document, else 0.

    >>> success(["x", "a"], {"a", "b"}), success(["x"], {"a"})
    (1.0, 0.0)
    """
    return float(bool(_hits(doc_ids, gold, k)))


def all_found(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Return 1 if the ranking has all gold documents, else 0.

    >>> all_found(["x", "a"], {"a", "b"}), all_found(["b", "a"], {"a", "b"})
    (0.0, 1.0)
    """
    hits = _hits(doc_ids, gold, k)
    return float(len(hits) == len(set(gold)))


def fact_em(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Return 1 if the ranking has all gold documents and no others, else 0.

    >>> fact_em(["b", "a"], {"a", "b"}), fact_em(["a", "b", "x"], {"a", "b"})
    (1.0, 0.0)
    """
    n_hits = len(_hits(doc_ids, gold, k))
    n_documents = len(set(doc_ids[:k]))
    return float(n_hits == len(set(gold)) == n_documents)


def fact_f1(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Return the harmonic mean of the ranking's recall and precision.

    >>> fact_f1(["a", "x"], {"a", "b"}), round(fact_f1(["a", "b", "x"], {"a", "b"}), 3)
    (0.5, 0.8)
    """
    n_hits = len(_hits(doc_ids, gold, k))
    n_documents = len(set(doc_ids[:k]))
    return 2 * n_hits / (len(set(gold)) + n_documents)


def _hits(doc_ids: Sequence[str], gold: Collection[str], k: int | None) -> list[int]:
    """Return the ranks of the gold documents, ascending."""
    if not gold:
        raise ValueError(_NO_GOLD)
    gold_ids = set(gold)
    ranking = dict.fromkeys(doc_ids[:k])
    return [rank for rank, doc_id in enumerate(ranking, 1) if doc_id in gold_ids]


def _gain(hits: Sequence[tuple[int, int]]) -> float:
    return sum(grade / math.log2(rank + 1) for rank, grade in hits)


def deepretrieval(outcome: Outcome, k: int | None = None) -> float | None:
    """Return a reward by tiers of recall.

    5 for .7 or more, 4 for .5, 3 for .4, 1 for .3, .5 for .1, .1 for .05, else -3.5.

    Source: DeepRetrieval (arXiv 2503.00223), code for literature search. For the paper's format
    rewards (+1, -4), use the part `format` and the recipe's ``unparsed_reward``.
    """
    share = of_ranking(recall)(outcome, k)
    if share is None:
        return None
    for least, reward in _TIERS:
        if share >= least:
            return reward
    return -3.5


def deep_recall(outcome: Outcome, depth: int = 100) -> float | None:
    """Return recall with partial credit for gold documents ranked too low to be retrieved.

    A gold document at rank ``r`` among a query's new documents counts ``1 / (1 + log2(1 + r))`` (at
    most .5), or 0 below rank ``depth``. Samples with equal recall thus differ in reward. Only
    sampling and training search to ``depth``; in evaluation, and at the program's end, the reward
    is plain recall.
    """
    task = outcome.task
    gold = set(task.gold)
    if not gold:
        return None
    retrieved = set(task.gold_ids(outcome.doc_ids))
    ranks: dict[str, int] = {}  # best rank of each new document
    for doc_ids in outcome.deep:
        new = [doc_id for doc_id in task.gold_ids(doc_ids[:depth]) if doc_id not in retrieved]
        for rank, doc_id in enumerate(new, 1):
            ranks[doc_id] = min(rank, ranks.get(doc_id, rank))
    missed = [ranks[doc_id] for doc_id in sorted(gold - retrieved) if doc_id in ranks]
    credit = sum(1 / (1 + math.log2(1 + rank)) for rank in missed)
    return (len(gold & retrieved) + credit) / len(gold)
