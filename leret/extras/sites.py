"""Keys and queries of public search sites with a query syntax, such as PubMed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from pydantic import Field

from leret.config.base import Free
from leret.config.retriever import HttpSettings
from leret.core.errors import RetrievalError
from leret.http.client import HttpError, RejectedError
from leret.retrieval.base import has_terms
from leret.retrieval.clients.base import Question, SearchClient

T = TypeVar("T")

_LOG = logging.getLogger("leret")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_OF_THE_KEY = re.compile(r"api[ _-]?key", re.IGNORECASE)


class SiteSettings(HttpSettings):
    """Keys shared by all search sites."""

    offline: Annotated[bool, Free()] = Field(
        False, description="use only cached answers; a miss is an error"
    )
    texts: bool = Field(True, description="fetch titles and texts, not only ids")


@dataclass(eq=False)
class Site(Generic[T]):
    """Search site with a query syntax.

    A query with invalid syntax gets an empty ranking, as on the site's search page. But wrong
    settings or a site that is down can cause the same HTTP status. So after a refusal, a simple
    query is sent with the same settings. If the simple query fails too, the refusal is reported as
    an error.
    """

    name: str  # used in messages
    most: int  # maximum number of passages per query
    client: SearchClient
    question: Callable[[str, int], Question[T]]  # builds a request from a query and k
    nothing: T  # result for a query with invalid syntax
    statuses: Collection[int]  # HTTP statuses that may mean a malformed or too long query
    n_refused: int = 0  # number of queries refused so far because of their syntax

    def ask(
        self, queries: Sequence[str], k: int, offline: bool
    ) -> tuple[list[str], dict[str, T | HttpError]]:
        """Return the cleaned queries, and a result or an error for each that has terms."""
        if not 1 <= k <= self.most:
            raise RetrievalError(f"k is {k}; {self.name} supports k from 1 to {self.most}")
        terms = [_CONTROL.sub(" ", query).strip() for query in queries]
        asked = list(dict.fromkeys(filter(has_terms, terms)))
        if offline and asked:  # cached queries do not reach this method
            raise RetrievalError(
                f"retriever.offline is set, but {len(asked)} queries are not in the cache "
                f"(first: {asked[0][:80]!r}); "
                "run once with offline: false to fill the cache"
            )
        outcomes = self.client.ask_each([self.question(term, k) for term in asked])
        answers = self._resolve(outcomes)
        return terms, dict(zip(asked, answers, strict=True))

    def _resolve(self, outcomes: Sequence[T | HttpError]) -> list[T | HttpError]:
        refused = list(filter(self._is_refused, outcomes))
        if not refused:
            return list(outcomes)
        substitute: T | HttpError = self.nothing
        [plain] = self.client.ask_each([self.question("heart", 1)])
        if isinstance(plain, HttpError):
            substitute = HttpError(
                f"{self.name} refuses even a simple query with the current settings: {plain}"
            )
        else:
            if not self.n_refused:
                _LOG.warning(
                    "%s refused the syntax of a query; such queries get empty rankings: %s",
                    self.name,
                    refused[0],
                )
            self.n_refused += len(refused)
        resolved = []
        for outcome in outcomes:
            resolved.append(substitute if self._is_refused(outcome) else outcome)
        return resolved

    def _is_refused(self, outcome: T | HttpError) -> bool:
        if not isinstance(outcome, RejectedError) or outcome.status not in self.statuses:
            return False
        return not _OF_THE_KEY.search(str(outcome))
