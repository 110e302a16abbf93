"""What an engine without an index says when it may not use the network."""

from __future__ import annotations

from collections.abc import Sequence

from leret.errors import RetrievalError
from leret.retrieval.queries import speaks

__all__ = ["refuse_offline"]


def refuse_offline(kind: str, queries: Sequence[str]) -> None:
    """Refuse what reaches the engine: the cache of answers, which stands before it, does not hold it.

    Raises:
        RetrievalError: any query says something.
    """
    lacking = [query for query in queries if speaks(query)]
    if lacking:
        raise RetrievalError(
            f"retriever.{kind}.offline is set, and the cache of answers does not hold {len(lacking)} queries, "
            f"{lacking[0][:80]!r} first; run with offline: false once, with the same cache"
        )
