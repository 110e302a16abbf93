"""Fusing what two queries found: the raw question's ranking and the rewritten query's."""

from __future__ import annotations

from collections.abc import Sequence

from leret.types import Passage, Ranking

__all__ = ["RRF_K", "fused", "fused_ids"]

RRF_K = 60
"""How slowly a rank loses weight."""


def fused_ids(rankings: Sequence[Sequence[str]], rrf_k: int = RRF_K) -> list[tuple[str, float]]:
    """Reciprocal rank fusion of document ids: a document's score is the sum of 1 / (rrf_k + rank).

    >>> [doc_id for doc_id, _ in fused_ids([["a", "b"], ["b", "c"]])]
    ['b', 'a', 'c']

    Args:
        rankings: ids, best first; an id counts at its first place.
        rrf_k: at least 0.

    Returns:
        Ids with their scores, best first; of equal ones, the one that came first.

    Source: Cormack, Clarke, Büttcher, SIGIR 2009.
    """
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, doc_id in enumerate(dict.fromkeys(ranking), 1):
            scores[doc_id] = scores.get(doc_id, 0.0) + 1.0 / (rrf_k + rank)
    return sorted(scores.items(), key=lambda item: -item[1])


def fused(rankings: Sequence[Ranking], k: int, rrf_k: int = RRF_K) -> Ranking:
    """Reciprocal rank fusion of rankings, at most ``k`` passages."""
    passages: dict[str, Passage] = {}
    for ranking in rankings:
        for passage in ranking:
            passages.setdefault(passage.doc_id, passage)
    best = fused_ids([[passage.doc_id for passage in ranking] for ranking in rankings], rrf_k)[:k]
    return tuple(Passage(doc_id, passages[doc_id].title, passages[doc_id].text, score) for doc_id, score in best)
