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
    """Fuse rankings by reciprocal rank. The score is the sum of ``weight / (constant + rank)``; ranks start at 1.

    Each passage is returned once, best first. Ties keep the order of the first ranking, then of the second, and so on.
    With a larger constant, the top ranks have less advantage.

    Source: Cormack, Clarke, Buettcher, SIGIR 2009 (all weights 1, constant 60).

    >>> a, b = Passage("a", "", "", 9.0), Passage("b", "", "", 8.0)
    >>> [(p.doc_id, round(p.score, 5)) for p in reciprocal_rank_fusion([(a, b), (b,)], [1, 1])]
    [('b', 0.03252), ('a', 0.01639)]
    """
    shares = [
        [1 / (constant + rank) for rank in range(1, len(ranking) + 1)] for ranking in rankings
    ]
    return _sum(rankings, shares, weights)


def linear_fusion(rankings: Sequence[Ranking], weights: Sequence[float]) -> Ranking:
    """Fuse rankings by the weighted sum of scores, after each ranking's scores are scaled to [0, 1].

    A passage missing from a ranking scores 0 there. If all scores of a ranking are equal, each is scaled to 1.
    """
    shares = []
    for ranking in rankings:
        scores = [passage.score for passage in ranking]
        low, high = min(scores, default=0.0), max(scores, default=0.0)
        shares.append([(score - low) / (high - low) if high > low else 1.0 for score in scores])
    return _sum(rankings, shares, weights)


def _sum(
    rankings: Sequence[Ranking], shares: Sequence[Sequence[float]], weights: Sequence[float]
) -> Ranking:
    totals: dict[str, float] = {}
    passages: dict[str, Passage] = {}
    for ranking, parts, weight in zip(rankings, shares, weights, strict=True):
        for passage, part in zip(ranking, parts, strict=True):
            totals[passage.doc_id] = totals.get(passage.doc_id, 0.0) + weight * part
            passages.setdefault(passage.doc_id, passage)
    best = sorted(
        totals, key=lambda doc_id: -totals[doc_id]
    )  # a stable sort, so ties keep their order
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
        return dict(zip(("first", "second"), settings.engines, strict=True))

    @staticmethod
    def manifest(
        parts: Sequence[Manifest], settings: FusionSettings, places: Mapping[str, str]
    ) -> Manifest:
        """Return a hybrid's manifest, with ``files`` empty. ``places`` maps each part's name to its index's path."""
        return Manifest(
            engine="hybrid",
            settings={
                "engines": [{"kind": p.engine, **p.settings} for p in parts],
                **settings.fusion_keys(),
            },
            versions={name: version for part in parts for name, version in part.versions.items()},
            corpus=parts[0].corpus,
            documents=parts[0].documents,
            parents=parts[0].parents,
            digest=_digest([part.digest for part in parts], settings),
            places=dict(places),
        )

    @staticmethod
    def settings_of(manifest: Manifest) -> FusionSettings:
        return FusionSettings(
            **{name: value for name, value in manifest.settings.items() if name != "engines"}
        )

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        settings = self._settings
        depth = max(clip_k(k, k), settings.depth)
        pairs = zip(
            *(retriever.search(queries, depth) for retriever in self._retrievers), strict=True
        )
        if settings.fusion == "rrf":
            return [
                reciprocal_rank_fusion(pair, settings.weights, settings.rank_constant)[:k]
                for pair in pairs
            ]
        return [linear_fusion(pair, settings.weights)[:k] for pair in pairs]


def _digest(parts: Sequence[str], settings: FusionSettings) -> str:
    return digest("hybrid", list(parts), settings.fusion_keys())
