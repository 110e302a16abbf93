"""A retriever whose answers are kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leret.config.retriever import AnswersSettings
from leret.core.files import cache_directory as default_directory
from leret.core.types import Ranking
from leret.retrieval.base import PartlyAnsweredError, Retriever
from leret.retrieval.diskcache import DiskCache

_FAST = frozenset({"bm25", "rm3"})
"""Engines that answer in a fraction of a millisecond: there is little to save (benchmarks/RESULTS.md)."""


class Kept:
    """Asks a retriever only for what no run has asked it before; safe for many threads.

    Args:
        retriever: answers what is not kept.
        cache: of answers.
    """

    def __init__(self, retriever: Retriever, cache: DiskCache) -> None:
        self.retriever = retriever
        self.cache = cache

    def __deepcopy__(self, memo: dict[int, object]) -> Kept:
        return self

    @property
    def digest(self) -> str:
        """The retriever's own: a cache changes no answer."""
        return self.retriever.digest

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query, from disk where it was asked before.

        Raises:
            RetrievalError: the retriever could not answer; what it did answer of the batch is kept.
        """
        name = self.digest
        answers = self.cache.get(name, queries, k)
        new = [query for query in dict.fromkeys(queries) if query not in answers]
        if new:
            try:
                found = dict(zip(new, self.retriever.search(new, k), strict=True))
            except PartlyAnsweredError as error:
                self.cache.put(name, error.answered, k)
                raise PartlyAnsweredError(error, answers | error.answered) from error
            self.cache.put(name, found, k)
            answers |= found
        return [answers[query] for query in queries]

    def close(self) -> None:
        """Close the cache and the retriever."""
        self.cache.close()
        close = getattr(self.retriever, "close", None)
        if close is not None:
            close()


def keep_answers(retriever: Retriever, kind: str, settings: AnswersSettings | None) -> Retriever:
    """The retriever behind the cache of answers, where the settings want it.

    By themselves they do not for a server that nobody has named: once another index stands behind its URL, the digest
    is still the old one, and so would the answers be.

    Args:
        retriever: of a recipe.
        kind: of its engine.
        settings: None takes the defaults.
    """
    settings = settings or AnswersSettings()
    wanted = kind not in _FAST and getattr(retriever, "names_its_index", True)
    if settings.use == "off" or (settings.use == "auto" and not wanted):
        return retriever
    directory = Path(settings.path) if settings.path else default_directory()
    return Kept(retriever, DiskCache(directory, settings.max_mb << 20))
