"""Turns what an engine found, places and scores, into passages."""

from __future__ import annotations

from collections.abc import Sequence

from leret.retrieval.stored import Placed
from leret.types import Passage, Ranking

__all__ = ["Passages"]

_MOST = 1 << 16
"""Documents kept decoded: what is found is found again and again."""

_made = tuple.__new__


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
        get, read = self._kept.get, self._read
        # as Passage(...) does it, without a call of its __new__ for each
        return tuple(
            [_made(Passage, (*(get(place) or read(place)), score)) for place, score in zip(places, scores, strict=True)]
        )

    def _read(self, place: int) -> tuple[str, str, str]:
        if len(self._kept) >= _MOST:
            self._kept.clear()
        document = self._kept[place] = self._at(place)
        return document
