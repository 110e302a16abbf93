"""Requests over equal servers: a slot, the least busy endpoint, and further attempts as long as an outage may pass."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import quote, urlencode

from leret.core.types import json_encoder
from leret.http.answers import MALFORMED, Answer, ApiKey, HttpError, RetryableError, one_line, read_body
from leret.http.endpoints import Clock, Endpoint, EndpointPool, RateLimit, checked_urls

if TYPE_CHECKING:
    import aiohttp
    from tenacity import AsyncRetrying, RetryCallState

    from leret.core.usage import UsageMeter

_LOG = logging.getLogger("leret")

T = TypeVar("T")

CONNECT_SHARE = 0.4
"""Of an attempt's time, for connecting: a server that does not accept is away, one that is late to answer is slow."""

_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0
_SENSELESS = frozenset({"malformed", "incomplete"})
_MAX_SENSELESS = 3
"""Answers of one request that make no sense, after which time will not mend them."""

encode_json = json_encoder(separators=(",", ":"), ensure_ascii=False)
"""A value as text."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request, apart from the server that it goes to.

    Attributes:
        params: of the URL; half a surrogate pair becomes a question mark.
        body: JSON, or of another ``content_type``.
    """

    method: str
    path: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str | None = None

    @classmethod
    def post(cls, path: str, value: Any) -> Call:
        """A value as JSON; half a surrogate pair, which UTF-8 cannot hold, is escaped."""
        body = encode_json(value).encode("utf-8", "backslashreplace")
        return cls("POST", path, {}, body)

    @classmethod
    def form(cls, path: str, values: Mapping[str, str]) -> Call:
        """Values URL-encoded in the body."""
        body = urlencode(values, errors="replace").encode()
        return cls("POST", path, {}, body, "application/x-www-form-urlencoded")


@dataclass(slots=True)
class _PerLoop:
    """What an event loop cannot share with another one."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore
    pool: EndpointPool


class Client:
    """Sends requests until they are answered. Safe to use from several event loops, each with limits of its own.

    Args:
        urls: base URLs of equal servers.
        setting: the recipe's section, for messages: ``policy`` or ``retriever``.
        key: sent in a header.
        secret: that requests hold otherwise; as the key, it is in no message.
        timeout_s: an attempt's deadline.
        retry_for_s: how long an outage is waited for, from the last answer on; 0 tries once.
        concurrency: requests in flight at most, in each event loop.
        also_retried: further status codes that are worth another attempt.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        setting: str,
        key: ApiKey | None = None,
        secret: ApiKey | None = None,
        timeout_s: float = 60.0,
        retry_for_s: float = 300.0,
        concurrency: int = 32,
        rate: RateLimit | None = None,
        also_retried: frozenset[int] = frozenset(),
        meter: UsageMeter | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.urls = checked_urls(urls, f"{setting}.urls")
        self.key = key or ApiKey()
        self._secret = secret or ApiKey()
        self._advice = {
            True: f"correct the key (api_key_env or token_env of the {setting})",
            False: f"correct {setting}.urls or the settings of the {setting}",
        }
        self._timeout_s, self._retry_for_s = timeout_s, retry_for_s
        self._concurrency = concurrency
        self._rate = rate
        self._also_retried = also_retried
        self._meter = meter
        self._clock, self._sleep = clock, sleep
        self._answered_at = float("-inf")  # when any request last was
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _PerLoop] = weakref.WeakKeyDictionary()
        weakref.finalize(self, _close_all, self._loops, os.getpid())

    async def request(
        self,
        call: Call,
        read: Callable[[Answer], T],
        *,
        timeout_s: float | None = None,
        retry_for_s: float | None = None,
    ) -> T:
        """Send a request until it is answered; RejectedError for good, RetryableError if it fails at the deadline.

        What ``read`` raises (`HttpError`, or anything that an unexpected shape does) is the attempt's failure.
        """
        mine, began = self._loops.get(asyncio.get_running_loop()) or self._open(), self._clock()
        once = partial(self._attempt, mine, call, read, timeout_s or self._timeout_s)
        try:
            return await once()  # tenacity would take a third of the CPU of a request that needs no second attempt
        except RetryableError as error:
            first = [error]

        async def attempt() -> T:
            if first:
                raise first.pop()
            return await once()

        # In an outage, most of a large batch waits for a slot: the outage is as old as the last answer.
        left_s = self._retry_for_s if retry_for_s is None else retry_for_s
        return await self._retrying(mine.pool, max(began, self._answered_at) + left_s)(attempt)

    async def aclose(self) -> None:
        """Close the running event loop's connections. May be called twice."""
        mine = self._loops.pop(asyncio.get_running_loop(), None)
        if mine is not None:
            await mine.session.close()

    async def _attempt(self, mine: _PerLoop, call: Call, read: Callable[[Answer], T], timeout_s: float) -> T:
        """Send a request once; HttpError where it failed."""
        async with mine.slots:
            endpoint = (mine.pool.take() if self._rate is None else None) or await self._turn(mine.pool)
            sent = self._clock()
            try:
                answer = await _by_aiohttp(mine.session, call, endpoint.url, timeout_s)
                if not 200 <= answer.status < 300:
                    answer.check(self._advice, self._also_retried)
                try:
                    value = read(answer)
                except MALFORMED as error:
                    raise answer.malformed(f"what cannot be read ({one_line(repr(error))})") from error
            except HttpError as error:
                error.args = (self._secret.redact(self.key.redact(str(error))),)
                mine.pool.failed(endpoint, sent, error)
                if self._meter is not None:
                    self._meter.fault(error.kind)
                raise
            except BaseException:
                mine.pool.succeeded(endpoint)  # interrupted: nothing is known of the server
                raise
            mine.pool.succeeded(endpoint)
            self._answered_at = self._clock()
            if self._meter is not None:
                self._meter.answered(self._answered_at - sent)
            return value

    async def _turn(self, pool: EndpointPool) -> Endpoint:
        """An endpoint, as soon as the rate and the servers' Retry-After allow."""
        while self._rate is not None and (wait_s := self._rate.wait_s()) > 0:
            await self._sleep(wait_s)
        while (endpoint := pool.take()) is None:
            await self._sleep(pool.opens_in_s())
        return endpoint

    def _retrying(self, pool: EndpointPool, deadline: float) -> AsyncRetrying:
        """Attempts until the deadline, on the client's clock, or as long as answers make sense."""
        from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

        backoff_s, senseless = wait_exponential(_BACKOFF_S, _LONGEST_BACKOFF_S), count(1)

        def too_late(state: RetryCallState) -> bool:
            useless = _failure(state).kind in _SENSELESS and next(senseless) >= _MAX_SENSELESS
            return useless or self._clock() + state.upcoming_sleep > deadline

        return AsyncRetrying(
            retry=retry_if_exception_type(RetryableError),
            wait=lambda state: max(backoff_s(state) * random.uniform(0.5, 1.5), pool.opens_in_s()),
            stop=too_late,
            before_sleep=self._told,
            retry_error_callback=_give_up,
            sleep=self._sleep,
        )

    def _told(self, state: RetryCallState) -> None:
        if self._meter is not None:
            self._meter.retried()
        _LOG.info("%s; attempt %d in %.3g s", _failure(state), state.attempt_number + 1, state.upcoming_sleep)

    def _open(self) -> _PerLoop:
        import aiohttp

        session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json", **self.key.headers()},
            connector=aiohttp.TCPConnector(limit=0),  # the slots count
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        mine = _PerLoop(session, asyncio.Semaphore(self._concurrency), EndpointPool(self.urls, self._clock))
        self._loops[asyncio.get_running_loop()] = mine
        return mine


async def _by_aiohttp(session: aiohttp.ClientSession, call: Call, base: str, timeout_s: float) -> Answer:
    import aiohttp
    from yarl import URL

    url = base + call.path
    query = f"?{urlencode(call.params, errors='replace', quote_via=quote)}" if call.params else ""
    try:
        async with session.request(
            call.method,
            URL(url + query, encoded=True),
            data=call.body,
            headers={"Content-Type": call.content_type} if call.content_type else None,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_SHARE * timeout_s),
        ) as response:
            return Answer(url, response.status, response.headers, await read_body(response.content.iter_any(), url))
    except (aiohttp.ClientError, ConnectionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise RetryableError(f"{url} cannot be reached ({what})", "connection") from error
    except TimeoutError as error:
        raise RetryableError(f"{url} did not answer within {timeout_s:.3g} s", "timeout") from error


def _failure(state: RetryCallState) -> RetryableError:
    """Of the last attempt."""
    failure = state.outcome.exception() if state.outcome else None
    assert isinstance(failure, RetryableError)
    return failure


def _give_up(state: RetryCallState) -> NoReturn:
    failure, n = _failure(state), state.attempt_number
    told = f"{failure}; gave up after {n} attempt{'s'[: n > 1]}; see that the server is up, then run again"
    raise RetryableError(told, failure.kind, failure.wait_s) from failure


def _close_all(loops: Mapping[asyncio.AbstractEventLoop, _PerLoop], pid: int) -> None:
    """Close the connections of a client that nobody uses any more, or that is left over when the process ends."""
    try:
        running: object = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    for loop, mine in list(loops.items()):
        if pid == os.getpid() and loop.is_running():
            closing = asyncio.run_coroutine_threadsafe(mine.session.close(), loop)
            if loop is not running:
                with suppress(TimeoutError):
                    closing.result(timeout=2)
