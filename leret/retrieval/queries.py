"""What every engine holds of odd queries.

A query without a letter or a digit says nothing, and has an empty ranking. Whatever else it holds, operators of a query
language, control characters, half a surrogate pair, is text and never syntax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leret.errors import RetrievalError
from leret.types import Ranking

__all__ = ["answered", "checked", "encodable", "speaks"]


def speaks(query: str) -> bool:
    """Does a query hold anything to search for?

    >>> speaks("?! ..."), speaks("a")
    (False, True)
    """
    return any(map(str.isalnum, query))


def encodable(text: str) -> str:
    r"""Text that UTF-8 can hold: half a surrogate pair becomes a replacement character.

    >>> encodable("a\ud800b") == "a\ufffdb"
    True
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def checked(k: int, n_documents: int) -> int:
    """How many documents an engine is asked for.

    Raises:
        RetrievalError: ``k`` is less than 1.
    """
    if k < 1:
        raise RetrievalError(f"k is {k}; ask for one document at least")
    return min(k, n_documents)


def answered(queries: Sequence[str], ask: Callable[[list[str]], Sequence[Ranking]]) -> list[Ranking]:
    """Rankings of all queries, where the engine is asked the ones that say something alone.

    Args:
        queries: any strings.
        ask: an engine's search: of text that can be encoded, one ranking a query.

    Returns:
        One ranking a query, in their order.
    """
    said = [query for query in queries if speaks(query)]
    found = iter(ask([encodable(query) for query in said]) if said else ())
    return [next(found) if speaks(query) else () for query in queries]
