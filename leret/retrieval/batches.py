"""Which queries go into one request, and what becomes of a request that is refused."""

from __future__ import annotations

from collections.abc import Sequence

from leret.retrieval.answers import RefusedError, encoded

__all__ = ["cut", "halves", "may_be_one_querys"]

_MOST_BYTES = 1_000_000
"""Of the queries of a request: servers and proxies take a MiB at least; a longer query goes alone."""

_ABOUT_A_QUERY = frozenset({200, 400, 413, 422})  # 200: an answer that is too large


def cut(queries: Sequence[str], most: int, most_bytes: int = _MOST_BYTES) -> list[list[int]]:
    """Places of the queries that go together, in their order.

    Args:
        queries: of a batch.
        most: queries of a request.
        most_bytes: of the queries of a request, as JSON.

    >>> cut(["a", "b", "c", "dddd", "e"], 2, 8)
    [[0, 1], [2], [3], [4]]
    """
    batches: list[list[int]] = []
    n_bytes = 0
    for place, query in enumerate(queries):
        size = len(encoded(query))
        if not batches or len(batches[-1]) == most or n_bytes + size > most_bytes:
            batches.append([])
            n_bytes = 0
        batches[-1].append(place)
        n_bytes += size
    return batches


def halves(batch: list[int]) -> list[list[int]]:
    """Both halves of a batch of two or more."""
    middle = len(batch) // 2
    return [batch[:middle], batch[middle:]]


def may_be_one_querys(answer: object) -> bool:
    """Is an answer a refusal that one query of several can have brought about?"""
    return isinstance(answer, RefusedError) and answer.status in _ABOUT_A_QUERY
