"""Asks an engine once for what many ask: samples of one state often write the same query."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from leret.retrieval.base import Retriever
from leret.types import Ranking

__all__ = ["Cached"]


class Cached:
    """A retriever that remembers its latest answers; safe for many threads.

    A query that stands twice in a batch is sent once. Two threads that ask the same new query at once may both send it.

    Args:
        retriever: answers what is not remembered.
        max_entries: answers kept, one for each (query, k); the one unused for longest goes first.
    """

    def __init__(self, retriever: Retriever, max_entries: int = 100_000) -> None:
        self._retriever = retriever
        self._max_entries = max_entries
        self._kept: OrderedDict[tuple[str, int], Ranking] = OrderedDict()
        self._lock = threading.Lock()
        self.n_hits = 0
        self.n_misses = 0

    @property
    def digest(self) -> str:
        """The retriever's own: a cache changes no answer."""
        return self._retriever.digest

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query, from memory where it was asked before.

        Raises:
            RetrievalError: the retriever could not answer; nothing of the batch is remembered then.
        """
        answers: dict[str, Ranking] = {}
        with self._lock:
            for query in dict.fromkeys(queries):
                kept = self._kept.get((query, k))
                if kept is not None:
                    self._kept.move_to_end((query, k))
                    answers[query] = kept
        new = [query for query in dict.fromkeys(queries) if query not in answers]
        if new:
            answers.update(zip(new, self._retriever.search(new, k), strict=True))
        with self._lock:
            self.n_misses += len(new)
            self.n_hits += len(queries) - len(new)
            for query in new:
                self._kept[query, k] = answers[query]
            while len(self._kept) > self._max_entries:
                self._kept.popitem(last=False)
        return [answers[query] for query in queries]
