"""What an engine without an index says when it may not use the network."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Sequence

from leret.core.errors import RetrievalError
from leret.retrieval.base import speaks
from leret.retrieval.clients.http import RefusedError


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


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


def pasted(query: str) -> str:
    r"""One line, operators and quotes as they are; control characters and halves of surrogate pairs become a space.

    >>> pasted('("heart attack"[MeSH]\nAND aspirin) ')
    '("heart attack"[MeSH] AND aspirin)'
    """
    return _CONTROL.sub(" ", query).strip()


_LOG = logging.getLogger("leret")

_SYNTAX = frozenset({400, 413, 414})
"""Statuses that may be about the query: malformed, too long."""

_OF_THE_KEY = re.compile(r"api[ _-]?key", re.IGNORECASE)


class Refusals:
    """Decides what a refused query means.

    A query whose syntax a site refuses finds nothing, as it would for a user. But settings that are wrong, and sites
    that have broken down, refuse in the same way, and must not make every query find nothing: so after a refusal a
    plain query is sent under the same settings, and if that is refused too, the refusal is an error.

    Args:
        site: as messages call it.
        ask_plain: sends a query that has no syntax to be wrong.
        statuses: that may be about the query.
    """

    def __init__(self, site: str, ask_plain: Callable[[], object], statuses: Collection[int] = _SYNTAX) -> None:
        self._site = site
        self._ask_plain = ask_plain
        self._statuses = statuses
        self._plain_asked = float("-inf")  # when the last one that was taken set out
        self.n = 0
        """Queries so far that were refused for their syntax."""

    def blame(self, error: RefusedError) -> None:
        """Return where the query is at fault.

        Raises:
            RetrievalError: the settings are, or the site did not take a plain query.
        """
        if error.status not in self._statuses or _OF_THE_KEY.search(str(error)):
            raise RetrievalError(str(error)) from error
        if self._plain_asked < error.at:
            began = time.monotonic()
            try:
                self._ask_plain()
            except RefusedError as plain:
                raise RetrievalError(f"{self._site} refuses every query under these settings: {plain}") from plain
            self._plain_asked = began
        self.n += 1
        if self.n == 1:
            _LOG.warning("%s refuses a query for its syntax; such queries find nothing: %s", self._site, error)
