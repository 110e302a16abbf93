"""Several rankings of one query made into one."""

from __future__ import annotations

from collections.abc import Sequence

from leret.core.types import Passage, Ranking


def reciprocal_ranks(rankings: Sequence[Ranking], weights: Sequence[float], constant: float = 60.0) -> Ranking:
    """Weighted reciprocal rank fusion: the sum of ``weight / (constant + rank)``, rank 1 being the best.

    Args:
        rankings: of one query.
        weights: one a ranking.
        constant: the larger, the less the first ranks stand out.

    Returns:
        Every passage once, best first; equal scores in the order of the first ranking, then of the next.

    Source:
        Cormack, Clarke, Buettcher, SIGIR 2009, which has all weights 1 and the constant 60.

    >>> a, b = Passage("a", "", "", 9.0), Passage("b", "", "", 8.0)
    >>> [(p.doc_id, round(p.score, 5)) for p in reciprocal_ranks([(a, b), (b,)], [1, 1])]
    [('b', 0.03252), ('a', 0.01639)]
    """
    shares = [[1 / (constant + rank) for rank in range(1, len(ranking) + 1)] for ranking in rankings]
    return _summed(rankings, shares, weights)


def weighted_sum(rankings: Sequence[Ranking], weights: Sequence[float]) -> Ranking:
    """The weighted sum of scores, those of each ranking first scaled to [0, 1]; who is not in a ranking has 0 there.

    Args:
        rankings: of one query.
        weights: one a ranking.

    Returns:
        As `reciprocal_ranks`. Where all scores of a ranking are equal, they are taken for 1.
    """
    shares = []
    for ranking in rankings:
        scores = [passage.score for passage in ranking]
        low, high = min(scores, default=0.0), max(scores, default=0.0)
        shares.append([(score - low) / (high - low) if high > low else 1.0 for score in scores])
    return _summed(rankings, shares, weights)


def _summed(
    rankings: Sequence[Ranking], shares: Sequence[Sequence[float]], weights: Sequence[float]
) -> tuple[Passage, ...]:
    totals: dict[str, float] = {}
    passages: dict[str, Passage] = {}
    for ranking, parts, weight in zip(rankings, shares, weights, strict=True):
        for passage, part in zip(ranking, parts, strict=True):
            totals[passage.doc_id] = totals.get(passage.doc_id, 0.0) + weight * part
            passages.setdefault(passage.doc_id, passage)
    best = sorted(totals, key=lambda doc_id: -totals[doc_id])  # stable
    return tuple(passages[doc_id]._replace(score=totals[doc_id]) for doc_id in best)
