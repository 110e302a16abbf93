"""What a search server said: an answer, a failure worth another try, or a refusal."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from leret.core.aio import submit
from leret.core.errors import ConfigError, RetrievalError
from leret.http.messages import MALFORMED, TooLargeError, body_of, hide, message_of, retry_after_s, short
from leret.retrieval.clients.ratelimit import RateLimit

if TYPE_CHECKING:
    import aiohttp


_RETRIED = frozenset({408, 425, 429})


@dataclass(frozen=True)
class Call:
    """A request, apart from the server that it goes to.

    Attributes:
        params: of the URL; encoded here, with half a surrogate pair as a question mark.
        form: sent URL-encoded in the body.
        json: sent as JSON in the body, `encoded`.
        n_queries: that it asks.
    """

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] | None = None
    json: Any = None
    n_queries: int = 1

    def body(self) -> tuple[bytes | None, str | None]:
        """What is sent after the headers, and its Content-Type."""
        if self.form is not None:
            return urlencode(self.form, errors="replace").encode(), "application/x-www-form-urlencoded"
        return (None, None) if self.json is None else (encoded(self.json), "application/json")


@dataclass(frozen=True)
class Answer:
    """A complete answer of status 200 to 299."""

    url: str
    text: str
    call: Call


class TryAgainError(Exception):
    """A failure that another attempt may mend.

    Args:
        reason: in a line.
        wait_s: what the server asked for; None leaves it to the back-off.
        busy: the server is well, and has too much to do.
    """

    def __init__(self, reason: str, wait_s: float | None = None, busy: bool = False) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.busy = busy


class BadAnswerError(TryAgainError):
    """An answer of status 200 that makes no sense; a few attempts tell a hiccup from a wrong URL."""


class RefusedError(RetrievalError):
    """A request that the server will never take as it is.

    Args:
        reason: in a line.
        status: of HTTP.

    Attributes:
        at: when it was refused, by the monotonic clock.
    """

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status
        self.at = time.monotonic()


def check(status: int, headers: Mapping[str, str], text: str, url: str) -> None:
    """Pass what succeeded.

    Raises:
        TryAgainError: 429, a time-out or a server error.
        RefusedError: any other refusal, with the server's message.
    """
    if 200 <= status < 300:
        return
    told = f"{url} answered {status}: {message_of(text)}"
    if status in _RETRIED or status >= 500:
        wait_s = retry_after_s(headers)
        raise TryAgainError(told, wait_s, busy=status == 429 or (status == 503 and wait_s is not None))
    raise RefusedError(f"{told}; look at the URL, the token and the settings of the retriever", status)


def encoded(value: Any) -> bytes:
    r"""JSON in UTF-8; half a surrogate pair, which UTF-8 cannot hold, is escaped.

    >>> encoded(["é", "\ud800"]) == b'["\xc3\xa9", "\\ud800"]'
    True
    """
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def parsed(answer: Answer) -> Any:
    """The JSON of an answer.

    Raises:
        BadAnswerError: it is none.
    """
    try:
        return json.loads(answer.text)
    except (ValueError, RecursionError) as error:
        raise BadAnswerError(f"{answer.url} sent no JSON ({error}): {short(answer.text)}") from error


LONGEST_PAUSE_S = 5.0


@dataclass
class Server:
    """One base URL and how it has been doing."""

    url: str
    n_in_flight: int = 0
    n_failures: int = 0
    resting_until: float = 0.0


class Rotation:
    """The least busy server is next; one that fails rests, longer each time, while others take its requests.

    Args:
        urls: base URLs.

    Raises:
        ConfigError: a URL is none.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Server(_checked(url)) for url in urls]

    def take(self) -> Server:
        """The least busy server that does not rest; where all rest, the one that is back first."""
        now = time.monotonic()
        awake = [server for server in self.all if server.resting_until <= now]
        if awake:
            chosen = min(awake, key=lambda server: server.n_in_flight)
        else:
            chosen = min(self.all, key=lambda server: server.resting_until)
        chosen.n_in_flight += 1
        return chosen

    def give_back(self, server: Server, ok: bool) -> None:
        """A request to it has ended; did the server do well?"""
        server.n_in_flight -= 1
        server.n_failures = 0 if ok else server.n_failures + 1
        pause_s = min(LONGEST_PAUSE_S, 0.5 * 2.0 ** min(server.n_failures, 10))
        server.resting_until = 0.0 if ok else time.monotonic() + pause_s


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or any(char.isspace() for char in url):
        raise ConfigError(f"{url!r} is no URL of a retriever; write it as in http://127.0.0.1:8893")
    return url.rstrip("/")


pass
pass


T = TypeVar("T")

_BACKOFF_S = 0.2
_BAD_ANSWERS = 3
"""Answers without sense in a row, of one request, after which the server is taken to be another one than was meant."""

_open: weakref.WeakSet[Client] = weakref.WeakSet()

_SECRET = re.compile(r"(api_key=)[^&]*")


class Client:
    """Sends batches of requests and waits for all of their answers; safe for many threads.

    Args:
        urls: base URLs of equal servers.
        token: sent as a bearer token and nowhere else, or as it is where it begins with ``Basic``; None sends none.
        secret: that requests hold otherwise; as the token, it is in no message.
        timeout_s: an attempt's deadline.
        patience_s: how long a request is tried again before the outage is an error.
        concurrency: requests in flight.
        limit: of requests a second; None sets none.

    Raises:
        ConfigError: a URL is none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        secret: str | None = None,
        timeout_s: float = 30.0,
        patience_s: float = 300.0,
        concurrency: int = 16,
        limit: RateLimit | None = None,
    ) -> None:
        self._servers = Rotation(urls)
        self._token = token
        self._secrets = [known for known in ((token or "").removeprefix("Basic "), secret) if known]
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._concurrency = concurrency
        self._limit = limit
        self._session: aiohttp.ClientSession | None = None
        self._session_pid = 0
        self._slots: asyncio.Semaphore | None = None
        self._running: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False
        self._answered = float("-inf")  # when any request last was
        _open.add(self)

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None and self._session_pid == os.getpid() and not sys.is_finalizing():
            submit(session.close())  # nobody asks any more, or the client would be alive

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs."""
        return tuple(server.url for server in self._servers.all)

    def ask(self, calls: Sequence[Call], read: Callable[[Answer], T]) -> list[T]:
        """Send requests, and wait until each is answered.

        Args:
            calls: sent concurrently.
            read: makes sense of an answer, or raises `BadAnswerError` or `TryAgainError`.

        Returns:
            What ``read`` made of each answer, in the order of the calls.

        Raises:
            RefusedError: a server refused a request for good.
            RetrievalError: the outage outlasted the client's patience, or the client was closed.
        """
        outcomes = self.ask_each(calls, read)
        for outcome in outcomes:
            if isinstance(outcome, RetrievalError):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, RetrievalError)]

    def ask_each(self, calls: Sequence[Call], read: Callable[[Answer], T]) -> list[T | RetrievalError]:
        """As `ask`, with the failure of a request in the place of its answer.

        Raises:
            RetrievalError: the client is closed, or was while it waited.
        """
        with self._lock:
            if self._closed:
                raise RetrievalError("this retriever is closed; open it again")
            future = submit(self._all(calls, read))
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
            session, self._session = self._session, None
        for future in running:
            future.cancel()
        if session is not None and self._session_pid == os.getpid():
            with suppress(TimeoutError):
                submit(session.close()).result(timeout=2)

    async def _all(self, calls: Sequence[Call], read: Callable[[Answer], T]) -> list[T | RetrievalError]:
        if self._session is None or self._session_pid != os.getpid():
            self._session, self._session_pid = self._new_session(), os.getpid()
            self._slots = asyncio.Semaphore(self._concurrency)
        began = time.monotonic()

        async def one(call: Call) -> T | RetrievalError:
            try:
                return await self._until_answered(call, read, began)
            except RetrievalError as error:
                return error

        tasks = [asyncio.create_task(one(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _until_answered(self, call: Call, read: Callable[[Answer], T], began: float) -> T:
        assert self._slots is not None
        first: float | None = None
        n_attempts = n_bad = 0
        while True:
            async with self._slots:
                while self._limit is not None and (wait_s := self._limit.wait_s()) > 0:
                    await asyncio.sleep(wait_s)
                first = time.monotonic() if first is None else first
                n_attempts += 1
                try:
                    return await self._once(call, read)
                except TryAgainError as failure:
                    n_bad += isinstance(failure, BadAnswerError)
                    wait_s = self._wait_s(failure, n_attempts, n_bad)
                    # in an outage most of a large batch has not had its first attempt; it is not waited for anew
                    deadline = min(first, max(began, self._answered)) + self._patience_s
                    if time.monotonic() + wait_s > deadline:
                        raise RetrievalError(
                            f"{failure}; tried {n_attempts} times, and waited {self._patience_s:g} s at most: see that "
                            "the server is up, then run again"
                        ).failed() from failure
            await asyncio.sleep(wait_s)

    def _wait_s(self, failure: TryAgainError, n_attempts: int, n_bad: int) -> float:
        """Seconds until the next attempt.

        Raises:
            RetrievalError: another attempt would be of no use.
        """
        if n_bad >= _BAD_ANSWERS:
            raise RetrievalError(f"{failure}; that is no answer of such a server: look at its URL and its log").failed()
        backoff_s = min(LONGEST_PAUSE_S, _BACKOFF_S * 2.0 ** min(n_attempts - 1, 10)) * random.uniform(0.5, 1.5)
        if failure.wait_s is None:
            return backoff_s
        if self._limit is not None and failure.busy:
            self._limit.pause(failure.wait_s)
        # a second is the least that a server can ask for; with 0, or a date that is past, it asks for nothing
        if failure.wait_s < 1:
            return max(failure.wait_s, backoff_s)
        return failure.wait_s + random.uniform(0, _BACKOFF_S)

    async def _once(self, call: Call, read: Callable[[Answer], T]) -> T:
        server = self._servers.take()
        ok = False
        try:
            try:
                value = read(await self._answer(server, call))
            except TooLargeError as error:
                raise RefusedError(f"{server.url}{call.path} sent {error}; lower k", 200).failed() from error
            except MALFORMED as error:
                told = short(repr(error))
                raise BadAnswerError(f"{server.url}{call.path} sent what cannot be read ({told})") from error
            ok = True
            self._answered = time.monotonic()
            return value
        except (RefusedError, TryAgainError) as failure:
            # where it was refused the server is well; the request is not
            ok = isinstance(failure, RefusedError) or failure.busy
            failure.args = (self._told(str(failure)),)
            raise
        finally:
            self._servers.give_back(server, ok)

    def _told(self, message: str) -> str:
        """A message that quotes a server, which may have sent back what it was sent."""
        for secret in self._secrets:
            message = hide(message, secret)
        return message

    async def _answer(self, server: Server, call: Call) -> Answer:
        import aiohttp
        from yarl import URL

        assert self._session is not None
        query = urlencode(call.params, errors="replace", quote_via=quote)
        address = f"{server.url}{call.path}" + (f"?{query}" if query else "")
        told = _SECRET.sub(r"\1...", f"{server.url}{call.path}")
        body, kind = call.body()
        headers = {}
        if self._token is not None:
            headers["Authorization"] = self._token if self._token.startswith("Basic ") else f"Bearer {self._token}"
        if kind is not None:
            headers["Content-Type"] = kind
        try:
            async with self._session.request(
                call.method,
                URL(address, encoded=True),
                data=body,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                text = (await body_of(answer.content.iter_any())).decode(answer.charset or "utf-8", "replace")
                check(answer.status, answer.headers, text, told)
                return Answer(told, text, call)
        except TimeoutError as error:
            raise TryAgainError(f"{told} did not answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            cause = _SECRET.sub(r"\1...", str(error))
            raise TryAgainError(f"{told} cannot be reached ({type(error).__name__}: {cause})") from error

    def _new_session(self) -> aiohttp.ClientSession:
        import aiohttp

        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            connector=aiohttp.TCPConnector(limit=self._concurrency),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "application/json, text/xml;q=0.9, */*;q=0.1"},
        )


@atexit.register
def _close_all() -> None:
    """Connections that nobody closed end without a warning of the event loop's."""
    for client in list(_open):
        client.close()


def token_of(variable: str | None, key: str) -> str | None:
    """The secret in an environment variable; None where no variable is named.

    Raises:
        ConfigError: it is not set, or no header can hold it.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"{key} names the environment variable {variable}, which is not set; export it")
    if not token.isprintable():
        raise ConfigError(f"{key} names the environment variable {variable}, which holds a line break or the like")
    return token
