"""What the clients of search servers share: blocking batches, and what a refused query means."""

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
from leret.http.answers import Answer, ApiKey, HttpError, RejectedError
from leret.http.client import Call, Client
from leret.http.endpoints import RateLimit
from leret.retrieval.base import PartialResultsError, has_terms

T = TypeVar("T")
Question = tuple[Call, Callable[[Answer], T]]
"""A request, and what makes sense of its answer."""

_LOG = logging.getLogger("leret")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_OF_THE_KEY = re.compile(r"api[ _-]?key", re.IGNORECASE)


class SearchClient:
    """Sends batches of requests and waits for all of their answers; safe for many threads.

    ``key`` is sent in a header; ``secret`` is what requests hold otherwise.
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
        """Send a request, and wait for its answer; RetrievalError where it failed."""
        outcome = self.ask_each([question])[0]
        if isinstance(outcome, HttpError):
            raise PartialResultsError(outcome, {}) from outcome
        return outcome

    def ask_each(self, questions: Sequence[Question[T]]) -> list[T | HttpError]:
        """Send requests concurrently: what was made of each answer, or its failure, in their order."""
        with self._lock:
            if self._closed:
                raise RetrievalError("this retriever is closed; open it again")
            future = submit(gathered(self._one(*question) for question in questions))
            self._running.add(future)
        try:
            return future.result()
        except CancelledError as error:
            raise RetrievalError("the retriever was closed while it was asked").failed() from error
        except BaseException:
            future.cancel()  # Ctrl-C in the thread that waits
            raise

    def close(self) -> None:
        """Give up what is asked now, and close the connections. May be called twice."""
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
    """One ranking a query; PartialResultsError with the first failure and the other rankings where some failed."""
    failure = next((outcome for outcome in outcomes if isinstance(outcome, HttpError)), None)
    answered = [(q, found) for q, found in zip(queries, outcomes, strict=True) if not isinstance(found, HttpError)]
    if failure is not None:
        raise PartialResultsError(failure, dict(answered)) from failure
    return [ranking for _, ranking in answered]


@dataclass(eq=False)
class Site(Generic[T]):
    """A site whose queries have a syntax: what is asked offline, and what a refused query means.

    A query whose syntax a site refuses finds nothing, as it would for a user. But settings that are wrong, and sites
    that have broken down, refuse in the same way, and must not make every query find nothing: so after a refusal a
    plain query is sent under the same settings, and if that is refused too, the refusal is an error.

    Attributes:
        name: as messages call it.
        most: passages a query.
        client: sends the requests.
        question: a query and k to a request.
        nothing: the answer to a query that is refused for its syntax.
        statuses: of HTTP that may be about the query: malformed, too long.
        n_refused: queries so far that were refused for their syntax.
    """

    name: str
    most: int
    client: SearchClient
    question: Callable[[str, int], Question[T]]
    nothing: T
    statuses: Collection[int]
    n_refused: int = 0

    def ask(self, queries: Sequence[str], k: int, offline: bool) -> tuple[list[str], dict[str, T | HttpError]]:
        """The queries as one would paste them there, and the site's answer to each that is not blank."""
        if not 1 <= k <= self.most:
            raise RetrievalError(f"k is {k}; {self.name} gives from 1 to {self.most} documents a query")
        terms = [_CONTROL.sub(" ", query).strip() for query in queries]
        asked = list(dict.fromkeys(filter(has_terms, terms)))
        if offline and asked:  # the cache stands before this
            raise RetrievalError(
                f"retriever.offline is set, and the cache does not hold {len(asked)} queries, {asked[0][:80]!r} first; "
                "run with offline: false once, with the same cache"
            )
        answers = self._settle(self.client.ask_each([self.question(term, k) for term in asked]))
        return terms, dict(zip(asked, answers, strict=True))

    def _settle(self, outcomes: Sequence[T | HttpError]) -> list[T | HttpError]:
        refused = {id(outcome): outcome for outcome in outcomes if self._is_of_the_query(outcome)}
        if not refused:
            return list(outcomes)
        plain = self.client.ask_each([self.question("heart", 1)])[0]
        if isinstance(plain, HttpError):
            fault = HttpError(f"{self.name} refuses every query under these settings: {plain}")
            return [fault if id(outcome) in refused else outcome for outcome in outcomes]
        if not self.n_refused:
            first = next(iter(refused.values()))
            _LOG.warning("%s refuses a query for its syntax; such queries find nothing: %s", self.name, first)
        self.n_refused += len(refused)
        return [self.nothing if id(outcome) in refused else outcome for outcome in outcomes]

    def _is_of_the_query(self, outcome: object) -> bool:
        is_refusal = isinstance(outcome, RejectedError) and outcome.status in self.statuses
        return is_refusal and not _OF_THE_KEY.search(str(outcome))
