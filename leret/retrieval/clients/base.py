"""Code that the search clients share: it sends batches of requests and handles refused queries."""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from leret.config.retriever import ClinicalTrialsSettings, PubMedSettings, RemoteSettings
from leret.core.aio import gathered, submit
from leret.core.errors import RetrievalError
from leret.core.types import Ranking
from leret.http.client import Answer, Call, Client, HttpError, RejectedError
from leret.http.endpoints import ApiKey, RateLimit
from leret.retrieval.base import PartialResultsError, has_terms

T = TypeVar("T")
Question = tuple[Call, Callable[[Answer], T]]
"""A request, and a function that parses the response."""

_LOG = logging.getLogger("leret")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_OF_THE_KEY = re.compile(r"api[ _-]?key", re.IGNORECASE)


class SearchClient:
    """Sends batches of HTTP requests and waits for them. Thread-safe.

    ``secret`` is sent as a request parameter.
    """

    def __init__(
        self,
        urls: Sequence[str],
        settings: RemoteSettings | PubMedSettings | ClinicalTrialsSettings,
        *,
        key: ApiKey | None = None,
        secret: ApiKey | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        self._client = Client(
            urls,
            setting="retriever",
            key=key,
            secret=secret,
            timeout_s=settings.timeout_s,
            retry_for_s=settings.retry_for_s,
            concurrency=settings.concurrency,
            rate=rate,
        )
        self.urls = self._client.urls
        self._running: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, question: Question[T]) -> T:
        """Send a request and return the parsed response.

        Raise RetrievalError if the request failed.
        """
        outcome = self.ask_each([question])[0]
        if isinstance(outcome, HttpError):
            raise PartialResultsError(outcome, {}) from outcome
        return outcome

    def ask_each(self, questions: Sequence[Question[T]]) -> list[T | HttpError]:
        """Send requests concurrently.

        Return a parsed response or an error per request, in order.
        """
        with self._lock:
            if self._closed:
                raise RetrievalError("this retriever is closed; open it again")
            future = submit(gathered(self._outcome(*question) for question in questions))
            self._running.add(future)
        try:
            return future.result()
        except CancelledError as error:
            raise RetrievalError(
                "the retriever was closed during a search; open it again"
            ).failed() from error
        except BaseException:
            future.cancel()  # Ctrl-C in the waiting thread
            raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running = list(self._running)
        for future in running:
            future.cancel()
        submit(self._client.aclose()).result(timeout=5)

    async def _outcome(self, call: Call, read: Callable[[Answer], T]) -> T | HttpError:
        try:
            return await self._client.request(call, read)
        except HttpError as error:
            return error


def rankings_of(queries: Sequence[str], outcomes: Sequence[Ranking | HttpError]) -> list[Ranking]:
    """Return one ranking per query.

    If any query failed, raise PartialResultsError with the first failure.
    """
    rankings: list[Ranking] = []
    answered: dict[str, Ranking] = {}
    failures: list[HttpError] = []
    for query, outcome in zip(queries, outcomes, strict=True):
        if isinstance(outcome, HttpError):
            failures.append(outcome)
        else:
            rankings.append(outcome)
            answered[query] = outcome
    if failures:
        raise PartialResultsError(failures[0], answered) from failures[0]
    return rankings


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
