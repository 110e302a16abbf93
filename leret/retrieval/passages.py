"""Turns what an engine found, places and scores, into passages."""

from __future__ import annotations

from collections.abc import Sequence

from leret.retrieval.stored import Placed
from leret.types import Passage, Ranking

__all__ = ["Passages"]

_MOST = 1 << 16
"""Documents kept decoded: what is found is found again and again."""


class Passages:
    """Makes rankings; safe for many threads.

    Args:
        documents: that places are of.
    """

    def __init__(self, documents: Placed) -> None:
        self._at = documents.at
        self._kept: dict[int, tuple[str, str, str]] = {}

    def ranking(self, places: Sequence[int], scores: Sequence[float]) -> Ranking:
        """Passages in the order given.

        Args:
            places: (n,) of documents, best first.
            scores: (n,) theirs.
        """
        kept = self._kept
        found = []
        for place, score in zip(places, scores, strict=True):
            document = kept.get(place)
            if document is None:
                if len(kept) >= _MOST:
                    kept.clear()
                document = kept[place] = self._at(place)
            found.append(Passage(*document, score))
        return tuple(found)
