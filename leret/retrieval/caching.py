"""Disk cache of rankings, shared by runs and processes."""

from __future__ import annotations

import logging
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diskcache  # type: ignore[import-untyped]

from leret.config.retriever import CacheSettings, RetrieverSettings
from leret.core.files import cache_directory
from leret.core.types import Passage, Ranking, SharedInstance, digest
from leret.retrieval.base import CallableRetriever, PartialResultsError, Retriever

_LOG = logging.getLogger("leret")

# kinds that answer in less than a millisecond, so a cache saves little
_FAST = frozenset({"bm25", "rm3", "none"})
_FAULTS = (sqlite3.Error, diskcache.Timeout, OSError, ValueError, TypeError, zlib.error)


class JsonDisk(diskcache.JSONDisk):
    """Store values as compressed JSON, and refuse to read pickled values."""

    def fetch(self, mode: int, filename: str, value: Any, read: bool) -> Any:
        if mode == diskcache.core.MODE_PICKLE:
            raise ValueError("the cache contains a pickle, which leret does not load")
        return super().fetch(mode, filename, value, read)


class CachedRetriever(CallableRetriever, SharedInstance):
    """Retriever with a disk cache: only queries that are not cached are searched. Thread-safe.

    If the cache files cannot be used, a warning is logged once and searches continue without the
    cache. When the cache exceeds ``max_bytes``, the least recently used rankings are deleted.
    """

    def __init__(self, retriever: Retriever, directory: Path, max_bytes: int = 2 << 30) -> None:
        self.retriever = retriever
        self._directory = directory
        self._cache: Any = None
        try:
            self._cache = diskcache.Cache(
                str(directory),
                size_limit=max_bytes,
                eviction_policy="least-recently-used",
                disk=JsonDisk,
                timeout=10,
            )
        except _FAULTS as error:
            self._give_up(error)

    @property
    def digest(self) -> str:
        return self.retriever.digest

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        rankings = self._read(queries, k)
        new = [query for query in dict.fromkeys(queries) if query not in rankings]
        if new:
            try:
                searched = dict(zip(new, self.retriever.search(new, k), strict=True))
            except PartialResultsError as error:
                self._write(error.answered, k)
                raise PartialResultsError(error, rankings | error.answered) from error
            self._write(searched, k)
            rankings |= searched
        return [rankings[query] for query in queries]

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        close = getattr(self.retriever, "close", None)
        if close is not None:
            close()

    def _read(self, queries: Sequence[str], k: int) -> dict[str, Ranking]:
        cached: dict[str, Ranking] = {}
        cache = self._cache
        if cache is None:
            return cached
        try:
            for query in dict.fromkeys(queries):
                rows = cache.get(digest(self.digest, k, query))
                if rows is not None:
                    cached[query] = tuple(Passage(*row) for row in rows)
        except _FAULTS as error:
            self._give_up(error)
        return cached

    def _write(self, rankings: Mapping[str, Ranking], k: int) -> None:
        cache = self._cache
        if cache is None:
            return
        try:
            with cache.transact():
                for query, ranking in rankings.items():
                    rows = [list(passage) for passage in ranking]
                    cache.set(digest(self.digest, k, query), rows)
        except _FAULTS as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._cache = None
        _LOG.warning(
            "cannot use the cache in %s (%s); if it is damaged, delete it", self._directory, error
        )


def with_cache(retriever: Retriever, settings: RetrieverSettings) -> Retriever:
    """Add a cache to the retriever if the settings ask for one.

    With ``auto``, fast kinds such as ``bm25`` and servers that do not name their index get no
    cache. When such a server switches to a different index at the same URL, the digest stays the
    same, and cached rankings would be wrong.
    """
    cache = settings.cache or CacheSettings()
    wanted = settings.kind not in _FAST and getattr(retriever, "names_its_index", True)
    if cache.use == "off" or (cache.use == "auto" and not wanted):
        return retriever
    directory = Path(cache.path) if cache.path else cache_directory() / "rankings"
    return CachedRetriever(retriever, directory, cache.max_mb << 20)
