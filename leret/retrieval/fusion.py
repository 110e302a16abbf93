"""Fusion of several rankings for one query, and the hybrid retriever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leret.config.retriever import FusionSettings, HybridSettings, LocalEngine
from leret.core.types import Passage, Ranking, digest
from leret.retrieval.base import CallableRetriever, Retriever, clip_k
from leret.retrieval.index.manifest import Manifest


def reciprocal_rank_fusion(
    rankings: Sequence[Ranking], weights: Sequence[float], constant: float = 60.0
) -> Ranking:
    """Fuse rankings by reciprocal rank.

    The score is the sum of ``weight / (constant + rank)``; ranks start at 1.

    Each passage is returned once, best first. Ties keep the order of the first ranking, then of the
    second, and so on. With a larger constant, the top ranks have less advantage.

    Source: Cormack, Clarke, Buettcher, SIGIR 2009 (all weights 1, constant 60).

    >>> a, b = Passage("a", "", "", 9.0), Passage("b", "", "", 8.0)
    >>> [(p.doc_id, round(p.score, 5)) for p in reciprocal_rank_fusion([(a, b), (b,)], [1, 1])]
    [('b', 0.03252), ('a', 0.01639)]
    """
    shares = []
    for ranking in rankings:
        ranks = range(1, len(ranking) + 1)
        shares.append([1 / (constant + rank) for rank in ranks])
    return _sum(rankings, shares, weights)


def linear_fusion(rankings: Sequence[Ranking], weights: Sequence[float]) -> Ranking:
    """Fuse rankings by the weighted sum of scores; each ranking's scores are scaled to [0, 1].

    A passage missing from a ranking scores 0 there. If all scores of a ranking are equal, each is
    scaled to 1.
    """
    shares = []
    for ranking in rankings:
        scores = [passage.score for passage in ranking]
        low = min(scores, default=0.0)
        high = max(scores, default=0.0)
        if high > low:
            shares.append([(score - low) / (high - low) for score in scores])
        else:
            shares.append([1.0 for _ in scores])
    return _sum(rankings, shares, weights)


def _sum(
    rankings: Sequence[Ranking], shares: Sequence[Sequence[float]], weights: Sequence[float]
) -> Ranking:
    totals: dict[str, float] = {}
    passages: dict[str, Passage] = {}
    for ranking, parts, weight in zip(rankings, shares, weights, strict=True):
        for passage, part in zip(ranking, parts, strict=True):
            doc_id = passage.doc_id
            totals[doc_id] = totals.get(doc_id, 0.0) + weight * part
            passages.setdefault(doc_id, passage)
    # a stable sort, so ties keep their order
    best = sorted(totals, key=lambda doc_id: -totals[doc_id])
    return tuple(passages[doc_id]._replace(score=totals[doc_id]) for doc_id in best)


class Hybrid(CallableRetriever):
    """Fusion of two retrievers over the same corpus. Ties keep the order of the first retriever."""

    def __init__(self, first: Retriever, second: Retriever, settings: FusionSettings) -> None:
        self._retrievers = (first, second)
        self._settings = settings
        self.digest = _digest((first.digest, second.digest), settings)

    @staticmethod
    def parts(settings: HybridSettings) -> dict[str, LocalEngine]:
        """Map the folder name of each retriever's index to the retriever's settings."""
        first, second = settings.engines
        return {"first": first, "second": second}

    @staticmethod
    def manifest(
        parts: Sequence[Manifest], settings: FusionSettings, paths: Mapping[str, str]
    ) -> Manifest:
        """Return a hybrid's manifest, with ``files`` empty.

        ``paths`` maps each part's name to its index's path.
        """
        engines = []
        versions: dict[str, str] = {}
        for part in parts:
            engines.append({"kind": part.engine, **part.settings})
            versions |= part.versions
        first = parts[0]
        return Manifest(
            engine="hybrid",
            settings={"engines": engines, **settings.fusion_keys()},
            versions=versions,
            corpus=first.corpus,
            documents=first.documents,
            parents=first.parents,
            digest=_digest([part.digest for part in parts], settings),
            places=dict(paths),
        )

    @staticmethod
    def settings_of(manifest: Manifest) -> FusionSettings:
        values = dict(manifest.settings)
        values.pop("engines", None)
        return FusionSettings(**values)

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        settings = self._settings
        depth = max(clip_k(k, k), settings.depth)
        first, second = self._retrievers
        rankings = []
        for pair in zip(first.search(queries, depth), second.search(queries, depth), strict=True):
            if settings.fusion == "rrf":
                fused = reciprocal_rank_fusion(pair, settings.weights, settings.rank_constant)
            else:
                fused = linear_fusion(pair, settings.weights)
            rankings.append(fused[:k])
        return rankings


def _digest(parts: Sequence[str], settings: FusionSettings) -> str:
    return digest("hybrid", list(parts), settings.fusion_keys())
