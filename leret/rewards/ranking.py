"""Measures of a ranking against the gold documents. All are in [0, 1]; higher is better.

Relevance is binary, except in nDCG where the data grade the gold documents.

Each takes the ids of the ranking, best first, and the gold ids; ``k`` looks at the first ``k`` alone. A document that
stands in a ranking twice counts at its first place. Gold documents that were never found count against every measure
but `rr` and `success`. A ranking without gold documents has no value: a ValueError here, None as a reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from leret.core.types import Outcome

Measure = Callable[[Sequence[str], Collection[str], int | None], float]


def of_ranking(measure: Measure) -> Callable[[Outcome, int | None], float | None]:
    """A measure as a reward of an outcome: of its ranking; None where the task has no gold documents."""

    def value(outcome: Outcome, k: int | None = None) -> float | None:
        task = outcome.task
        gold = task.grades if task.relevance else task.gold
        return measure([passage.doc_id for passage in outcome.ranking], gold, k) if gold else None

    return value


def recall(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """The share of the gold documents that was found.

    >>> recall(["a", "x"], {"a", "b"})
    0.5
    """
    return len(_hits(doc_ids, gold, k)) / len(set(gold))


def ap(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Average precision: the mean over gold documents of the precision at the place of each, 0 where it is not found.

    >>> ap(["a", "x", "b"], {"a", "b"})  # (1/1 + 2/3) / 2
    0.8333333333333333

    Source: LeReT, section 4.2: sum over hits of (hits so far / rank), over the number of gold documents.
    """
    return sum(hits / rank for hits, rank in enumerate(_hits(doc_ids, gold, k), 1)) / len(set(gold))


def rr(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Reciprocal rank of the first gold document, 0 where none was found.

    >>> rr(["x", "a"], {"a", "b"})
    0.5
    """
    ranks = _hits(doc_ids, gold, k)
    return 1 / ranks[0] if ranks else 0.0


def ndcg(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Discounted cumulative gain (grade / log2(rank + 1) a hit) over that of the ideal ranking.

    A gold document is of grade 1, unless ``gold`` maps it to its grade.

    >>> round(ndcg(["x", "a"], {"a"}), 4)  # (1 / log2 3) / (1 / log2 2)
    0.6309
    >>> round(ndcg(["x", "a"], {"a": 1, "b": 2}), 4)  # (1 / log2 3) / (2 / log2 2 + 1 / log2 3)
    0.2398

    Source: Järvelin and Kekäläinen (2002), with the discount of trec_eval.
    """
    grades = gold if isinstance(gold, Mapping) else dict.fromkeys(gold, 1)
    ranking = list(dict.fromkeys(doc_ids[:k]))
    found = [(rank, grades[ranking[rank - 1]]) for rank in _hits(doc_ids, gold, k)]
    return _gain(found) / _gain(list(enumerate(sorted(grades.values(), reverse=True), 1))[:k])


def success(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """1 where any gold document was found, else 0.

    >>> success(["x", "a"], {"a", "b"}), success(["x"], {"a"})
    (1.0, 0.0)
    """
    return float(bool(_hits(doc_ids, gold, k)))


def all_found(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """1 where every gold document was found, else 0.

    >>> all_found(["x", "a"], {"a", "b"}), all_found(["b", "a"], {"a", "b"})
    (0.0, 1.0)
    """
    return float(len(_hits(doc_ids, gold, k)) == len(set(gold)))


def fact_em(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """1 where the gold documents were found and nothing else, else 0; `all_found` asks for the first alone.

    >>> fact_em(["b", "a"], {"a", "b"}), fact_em(["a", "b", "x"], {"a", "b"})
    (1.0, 0.0)
    """
    return float(len(_hits(doc_ids, gold, k)) == len(set(gold)) == len(set(doc_ids[:k])))


def fact_f1(doc_ids: Sequence[str], gold: Collection[str], k: int | None = None) -> float:
    """Harmonic mean of recall and precision of what was found, whatever its order.

    >>> fact_f1(["a", "x"], {"a", "b"}), round(fact_f1(["a", "b", "x"], {"a", "b"}), 3)
    (0.5, 0.8)
    """
    return 2 * len(_hits(doc_ids, gold, k)) / (len(set(gold)) + len(set(doc_ids[:k])))


def _hits(doc_ids: Sequence[str], gold: Collection[str], k: int | None) -> list[int]:
    """Ranks, from 1, of the gold documents in the ranking."""
    if not gold:
        raise ValueError("a ranking without gold documents has no value")
    wanted = set(gold)
    return [rank for rank, doc_id in enumerate(dict.fromkeys(doc_ids[:k]), 1) if doc_id in wanted]


def _gain(found: Sequence[tuple[int, int]]) -> float:
    return sum(grade / math.log2(rank + 1) for rank, grade in found)
