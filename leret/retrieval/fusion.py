"""Several rankings of one query made into one, and the retriever that asks two others."""

from __future__ import annotations

from collections.abc import Sequence

from leret.config.retriever import FusionSettings, HybridSettings, LocalEngine
from leret.core.types import Passage, Ranking, digest
from leret.retrieval.base import CallableRetriever, Retriever, clip_k


def reciprocal_rank_fusion(rankings: Sequence[Ranking], weights: Sequence[float], constant: float = 60.0) -> Ranking:
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
    >>> [(p.doc_id, round(p.score, 5)) for p in reciprocal_rank_fusion([(a, b), (b,)], [1, 1])]
    [('b', 0.03252), ('a', 0.01639)]
    """
    shares = [[1 / (constant + rank) for rank in range(1, len(ranking) + 1)] for ranking in rankings]
    return _sum(rankings, shares, weights)


def linear_fusion(rankings: Sequence[Ranking], weights: Sequence[float]) -> Ranking:
    """The weighted sum of scores, those of each ranking first scaled to [0, 1]; who is not in a ranking has 0 there.

    Returns:
        As `reciprocal_rank_fusion`. Where all scores of a ranking are equal, they are taken for 1.
    """
    shares = []
    for ranking in rankings:
        scores = [passage.score for passage in ranking]
        low, high = min(scores, default=0.0), max(scores, default=0.0)
        shares.append([(score - low) / (high - low) if high > low else 1.0 for score in scores])
    return _sum(rankings, shares, weights)


def _sum(rankings: Sequence[Ranking], shares: Sequence[Sequence[float]], weights: Sequence[float]) -> Ranking:
    totals: dict[str, float] = {}
    passages: dict[str, Passage] = {}
    for ranking, parts, weight in zip(rankings, shares, weights, strict=True):
        for passage, part in zip(ranking, parts, strict=True):
            totals[passage.doc_id] = totals.get(passage.doc_id, 0.0) + weight * part
            passages.setdefault(passage.doc_id, passage)
    best = sorted(totals, key=lambda doc_id: -totals[doc_id])  # stable
    return tuple(passages[doc_id]._replace(score=totals[doc_id]) for doc_id in best)


class Hybrid(CallableRetriever):
    """Asks two retrievers of one corpus, and fuses their rankings. Equal scores stand in the first one's order."""

    def __init__(self, first: Retriever, second: Retriever, settings: FusionSettings) -> None:
        self._retrievers = (first, second)
        self._settings = settings
        self.digest = hybrid_digest((first.digest, second.digest), settings)

    @staticmethod
    def parts(settings: HybridSettings) -> dict[str, LocalEngine]:
        """The two, by the folder of their index."""
        return dict(zip(("first", "second"), settings.engines, strict=True))

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        settings = self._settings
        depth = max(clip_k(k, k), settings.depth)
        pairs = zip(*(retriever.search(queries, depth) for retriever in self._retrievers), strict=True)
        if settings.fusion == "rrf":
            return [reciprocal_rank_fusion(pair, settings.weights, settings.rank_constant)[:k] for pair in pairs]
        return [linear_fusion(pair, settings.weights)[:k] for pair in pairs]


def hybrid_digest(parts: Sequence[str], settings: FusionSettings) -> str:
    """Of a hybrid of retrievers with these digests."""
    return digest("hybrid", list(parts), settings.fusion_keys())
