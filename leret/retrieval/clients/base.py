"""What the clients of search servers share: blocking batches, and what a refused query means."""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from leret.config.retriever import ClinicalTrialsSettings, PubMedSettings, RemoteSettings
from leret.core.aio import gathered, submit
from leret.core.errors import RetrievalError
from leret.core.types import Ranking
from leret.http.answers import Answer, ApiKey, HttpError, RejectedError
from leret.http.client import Call, Client
from leret.http.endpoints import RateLimit
from leret.retrieval.base import has_terms, raise_if_partial

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
            raise retrieval_error(outcome) from outcome
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


def retrieval_error(error: HttpError) -> RetrievalError:
    """A failed request as the retriever's failure."""
    failure = RetrievalError(str(error))
    failure.exit_code = error.exit_code
    return failure


def rankings_of(queries: Sequence[str], outcomes: Sequence[Ranking | HttpError]) -> list[Ranking]:
    """One ranking a query; PartialResultsError where a request failed."""
    return raise_if_partial(queries, [retrieval_error(one) if isinstance(one, HttpError) else one for one in outcomes])


def refuse_offline(queries: Sequence[str]) -> None:
    """Refuse what reaches the engine: the cache, which stands before it, does not hold it."""
    lacking = [query for query in queries if has_terms(query)]
    if lacking:
        raise RetrievalError(
            f"retriever.offline is set, and the cache does not hold {len(lacking)} queries, "
            f"{lacking[0][:80]!r} first; run with offline: false once, with the same cache"
        )


def pasted(query: str) -> str:
    r"""One line, operators and quotes as they are; control characters and halves of surrogate pairs become a space.

    >>> pasted('("heart attack"[MeSH]\nAND aspirin) ')
    '("heart attack"[MeSH] AND aspirin)'
    """
    return _CONTROL.sub(" ", query).strip()


class Refusals:
    """Decides what refused queries mean.

    A query whose syntax a site refuses finds nothing, as it would for a user. But settings that are wrong, and sites
    that have broken down, refuse in the same way, and must not make every query find nothing: so after a refusal a
    plain query is sent under the same settings, and if that is refused too, the refusal is an error.

    Args:
        site: as messages call it.
        ask_plain: sends a query that has no syntax to be wrong; gives its answer, or its failure.
        statuses: of HTTP that may be about the query: malformed, too long.
    """

    def __init__(self, site: str, ask_plain: Callable[[], object], statuses: Collection[int]) -> None:
        self._site = site
        self._ask_plain = ask_plain
        self._statuses = statuses
        self.n = 0
        """Queries so far that were refused for their syntax."""

    def settle(self, outcomes: Sequence[T | HttpError], nothing: T) -> list[T | HttpError]:
        """The outcomes of a batch, with ``nothing`` for each query that is at fault itself."""
        refused = {id(outcome): outcome for outcome in outcomes if self._of_the_query(outcome)}
        if not refused:
            return list(outcomes)
        plain = self._ask_plain()
        if isinstance(plain, HttpError):
            fault = HttpError(f"{self._site} refuses every query under these settings: {plain}")
            return [fault if id(outcome) in refused else outcome for outcome in outcomes]
        if not self.n:
            first = next(iter(refused.values()))
            _LOG.warning("%s refuses a query for its syntax; such queries find nothing: %s", self._site, first)
        self.n += len(refused)
        return [nothing if id(outcome) in refused else outcome for outcome in outcomes]

    def _of_the_query(self, outcome: object) -> bool:
        return (
            isinstance(outcome, RejectedError)
            and outcome.status in self._statuses
            and not _OF_THE_KEY.search(str(outcome))
        )
