"""Shared parts of clients of search servers: blocking batches, and the handling of refused queries."""

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
"""A request, and a function that reads its answer."""

_LOG = logging.getLogger("leret")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_OF_THE_KEY = re.compile(r"api[ _-]?key", re.IGNORECASE)


class SearchClient:
    """Blocking batches of requests; safe for many threads. ``secret`` is a key inside requests."""

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
        """Send a request and wait for its answer; RetrievalError if it failed."""
        outcome = self.ask_each([question])[0]
        if isinstance(outcome, HttpError):
            raise PartialResultsError(outcome, {}) from outcome
        return outcome

    def ask_each(self, questions: Sequence[Question[T]]) -> list[T | HttpError]:
        """Send requests concurrently; return the answers or failures in their order."""
        with self._lock:
            if self._closed:
                raise RetrievalError("this retriever is closed; open it again")
            future = submit(gathered(self._one(*question) for question in questions))
            self._running.add(future)
        try:
            return future.result()
        except CancelledError as error:
            raise RetrievalError("the retriever was closed during a search").failed() from error
        except BaseException:
            future.cancel()  # after Ctrl-C in the waiting thread
            raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running = list(self._running)
        for future in running:
            future.cancel()
        submit(self._client.aclose()).result(timeout=5)

    async def _one(self, call: Call, read: Callable[[Answer], T]) -> T | HttpError:
        try:
            return await self._client.request(call, read)
        except HttpError as error:
            return error


def rankings_of(queries: Sequence[str], outcomes: Sequence[Ranking | HttpError]) -> list[Ranking]:
    """Return one ranking per query; PartialResultsError with the first failure if some failed."""
    failure = next((outcome for outcome in outcomes if isinstance(outcome, HttpError)), None)
    answered = [(q, one) for q, one in zip(queries, outcomes, strict=True) if not isinstance(one, HttpError)]
    if failure is not None:
        raise PartialResultsError(failure, dict(answered)) from failure
    return [ranking for _, ranking in answered]


@dataclass(eq=False)
class Site(Generic[T]):
    """A site with a query syntax.

    A query with a syntax that the site refuses has an empty ranking, as on the site. But wrong settings and broken
    sites refuse queries in the same way. So after a refusal a plain query is sent under the same settings; if that is
    refused too, the refusal is an error.
    """

    name: str  # in messages
    most: int  # passages per query
    client: SearchClient
    question: Callable[[str, int], Question[T]]  # makes a request of a query and k
    nothing: T  # answer to a query that is refused for its syntax
    statuses: Collection[int]  # HTTP statuses of refusals that may concern the query: malformed, too long
    n_refused: int = 0  # queries refused for their syntax

    def ask(self, queries: Sequence[str], k: int, offline: bool) -> tuple[list[str], dict[str, T | HttpError]]:
        """Return the cleaned queries, and the site's answer to each that is not blank."""
        if not 1 <= k <= self.most:
            raise RetrievalError(f"k is {k}; {self.name} returns from 1 to {self.most} documents per query")
        terms = [_CONTROL.sub(" ", query).strip() for query in queries]
        asked = list(dict.fromkeys(filter(has_terms, terms)))
        if offline and asked:  # not in the cache, which is asked first
            raise RetrievalError(
                f"retriever.offline is set, but {len(asked)} queries are not in the cache, {asked[0][:80]!r} first; "
                "run with offline: false once, with the same cache"
            )
        answers = self._resolve(self.client.ask_each([self.question(term, k) for term in asked]))
        return terms, dict(zip(asked, answers, strict=True))

    def _resolve(self, outcomes: Sequence[T | HttpError]) -> list[T | HttpError]:
        rejected = [one for one in outcomes if isinstance(one, RejectedError) and one.status in self.statuses]
        refused = {id(one): one for one in rejected if not _OF_THE_KEY.search(str(one))}
        if not refused:
            return list(outcomes)
        plain = self.client.ask_each([self.question("heart", 1)])[0]
        if isinstance(plain, HttpError):
            fault = HttpError(f"{self.name} refuses every query under these settings: {plain}")
            return [fault if id(outcome) in refused else outcome for outcome in outcomes]
        if not self.n_refused:
            first = next(iter(refused.values()))
            _LOG.warning("%s refuses a query for its syntax; such queries have empty rankings: %s", self.name, first)
        self.n_refused += len(refused)
        return [self.nothing if id(outcome) in refused else outcome for outcome in outcomes]
