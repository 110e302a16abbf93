"""Code that the search clients share: it sends batches of requests."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from leret.config.retriever import HttpSettings
from leret.core.aio import gathered, submit
from leret.core.errors import RetrievalError
from leret.core.types import Ranking
from leret.http.client import Answer, Call, Client, HttpError
from leret.http.endpoints import ApiKey, RateLimit
from leret.retrieval.base import PartialResultsError

T = TypeVar("T")
Question = tuple[Call, Callable[[Answer], T]]
"""A request, and a function that parses the response."""


class SearchClient:
    """Sends batches of HTTP requests and waits for them. Thread-safe."""

    def __init__(
        self,
        urls: Sequence[str],
        settings: HttpSettings,
        *,
        key: ApiKey | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        self._client = Client(
            urls,
            setting="retriever",
            key=key,
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
