"""A query that a site refuses: the query's fault, or ours."""

from __future__ import annotations

import logging
from collections.abc import Callable

from leret.errors import RetrievalError
from leret.retrieval.answers import RefusedError

__all__ = ["Refusals"]

_LOG = logging.getLogger("leret")

_SYNTAX = frozenset({400, 413, 414})
"""Statuses that may be about the query: malformed, too long."""


class Refusals:
    """Decides what a refused query means.

    A query whose syntax a site refuses finds nothing, as it would for a user. But settings that are wrong are refused
    in the same way, and must not make every query find nothing: so a plain query is sent under the same settings,
    once, and if that is refused too, the refusal is an error.

    Args:
        site: as messages call it.
        ask_plain: sends a query that has no syntax to be wrong.
    """

    def __init__(self, site: str, ask_plain: Callable[[], object]) -> None:
        self._site = site
        self._ask_plain = ask_plain
        self._plain_is_taken = False
        self.n = 0
        """Queries so far that were refused for their syntax."""

    def blame(self, error: RefusedError) -> None:
        """Return where the query is at fault.

        Raises:
            RetrievalError: the settings are, or the site did not take a plain query.
        """
        if error.status not in _SYNTAX:
            raise RetrievalError(str(error)) from error
        if not self._plain_is_taken:
            try:
                self._ask_plain()
            except RefusedError as plain:
                raise RetrievalError(f"{self._site} refuses every query under these settings: {plain}") from plain
            self._plain_is_taken = True
        self.n += 1
        if self.n == 1:
            _LOG.warning("%s refuses a query for its syntax; such queries find nothing: %s", self._site, error)
