"""A client of equal servers: limits concurrency, picks the least busy server, and retries through outages."""

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

    from leret.http.usage import UsageMeter

_LOG = logging.getLogger("leret")

T = TypeVar("T")

CONNECT_SHARE = 0.4
"""Share of an attempt's time for connecting: a server that does not accept in time is down, not slow."""

_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0
_UNUSABLE = frozenset({"malformed", "incomplete"})
_MAX_UNUSABLE = 3  # such answers to one request after which the client gives up

encode_json = json_encoder(separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Call:
    """A request without its server; ``body`` is JSON, unless ``content_type`` names another type."""

    method: str
    path: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str | None = None

    @classmethod
    def post(cls, path: str, value: Any) -> Call:
        """Build a JSON request; lone surrogates, which UTF-8 lacks, are escaped."""
        body = encode_json(value).encode("utf-8", "backslashreplace")
        return cls("POST", path, {}, body)

    @classmethod
    def form(cls, path: str, values: Mapping[str, str]) -> Call:
        body = urlencode(values, errors="replace").encode()
        return cls("POST", path, {}, body, "application/x-www-form-urlencoded")


@dataclass(slots=True)
class _PerLoop:
    # The objects that event loops cannot share.
    session: aiohttp.ClientSession
    slots: asyncio.Semaphore
    pool: EndpointPool


class Client:
    """A client that retries requests until they are answered.

    Args:
        setting: the recipe's section, for messages: ``policy`` or ``retriever``.
        secret: in requests, and removed from messages like the key.
        timeout_s: deadline of one attempt.
        retry_for_s: how long to wait in an outage, from the last answer on; 0 tries once.
        concurrency: maximum number of requests in flight per event loop.
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
        self._meter = meter
        self._clock, self._sleep = clock, sleep
        self._answered_at = float("-inf")  # time of the last answer to any request
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
        """Send a request until it is answered; RejectedError at once, RetryableError at the deadline.

        An attempt also fails with the exceptions of ``read``: `HttpError`, or those of an unexpected shape.
        """
        local, began = self._loops.get(asyncio.get_running_loop()) or self._open(), self._clock()
        once = partial(self._attempt, local, call, read, timeout_s or self._timeout_s)
        try:
            return await once()  # without tenacity, which takes a third of the CPU of a successful request
        except RetryableError as error:
            first = [error]

        async def attempt() -> T:
            if first:
                raise first.pop()
            return await once()

        # In an outage, most of a large batch waits for a slot: the outage began at the last answer.
        left_s = self._retry_for_s if retry_for_s is None else retry_for_s
        return await self._retrying(local.pool, max(began, self._answered_at) + left_s)(attempt)

    async def aclose(self) -> None:
        """Close the running event loop's connections. May be called twice."""
        local = self._loops.pop(asyncio.get_running_loop(), None)
        if local is not None:
            await local.session.close()

    async def _attempt(self, local: _PerLoop, call: Call, read: Callable[[Answer], T], timeout_s: float) -> T:
        async with local.slots:
            endpoint = (local.pool.take() if self._rate is None else None) or await self._turn(local.pool)
            sent = self._clock()
            try:
                answer = await _by_aiohttp(local.session, call, endpoint.url, timeout_s)
                if not 200 <= answer.status < 300:
                    answer.check(self._advice)
                try:
                    value = read(answer)
                except MALFORMED as error:
                    raise answer.malformed(f"an unexpected answer ({one_line(repr(error))})") from error
            except HttpError as error:
                error.args = (self._secret.redact(self.key.redact(str(error))),)
                local.pool.failed(endpoint, sent, error)
                if self._meter is not None:
                    self._meter.fault(error.kind)
                raise
            except BaseException:
                local.pool.succeeded(endpoint)  # interrupted: says nothing about the server
                raise
            local.pool.succeeded(endpoint)
            self._answered_at = self._clock()
            if self._meter is not None:
                self._meter.answered(self._answered_at - sent)
            return value

    async def _turn(self, pool: EndpointPool) -> Endpoint:
        while self._rate is not None and (wait_s := self._rate.wait_s()) > 0:
            await self._sleep(wait_s)
        while (endpoint := pool.take()) is None:
            await self._sleep(pool.opens_in_s())
        return endpoint

    def _retrying(self, pool: EndpointPool, deadline: float) -> AsyncRetrying:
        """Return tenacity's attempts until the deadline on the client's clock, or too many unusable answers."""
        from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

        backoff_s, unusable = wait_exponential(_BACKOFF_S, _LONGEST_BACKOFF_S), count(1)

        def too_late(state: RetryCallState) -> bool:
            useless = _failure(state).kind in _UNUSABLE and next(unusable) >= _MAX_UNUSABLE
            return useless or self._clock() + state.upcoming_sleep > deadline

        return AsyncRetrying(
            retry=retry_if_exception_type(RetryableError),
            wait=lambda state: max(backoff_s(state) * random.uniform(0.5, 1.5), pool.opens_in_s()),
            stop=too_late,
            before_sleep=self._log_retry,
            retry_error_callback=_give_up,
            sleep=self._sleep,
        )

    def _log_retry(self, state: RetryCallState) -> None:
        if self._meter is not None:
            self._meter.retried()
        _LOG.info("%s; attempt %d in %.3g s", _failure(state), state.attempt_number + 1, state.upcoming_sleep)

    def _open(self) -> _PerLoop:
        import aiohttp

        session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json", **self.key.headers()},
            connector=aiohttp.TCPConnector(limit=0),  # the slots limit it
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        local = _PerLoop(session, asyncio.Semaphore(self._concurrency), EndpointPool(self.urls, self._clock))
        self._loops[asyncio.get_running_loop()] = local
        return local


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
        cause = f"{type(error).__name__}: {error}"
        raise RetryableError(f"{url} cannot be reached ({cause})", "connection") from error
    except TimeoutError as error:
        raise RetryableError(f"{url} did not answer within {timeout_s:.3g} s", "timeout") from error


def _failure(state: RetryCallState) -> RetryableError:
    failure = state.outcome.exception() if state.outcome else None
    assert isinstance(failure, RetryableError)
    return failure


def _give_up(state: RetryCallState) -> NoReturn:
    failure, n = _failure(state), state.attempt_number
    message = f"{failure}; gave up after {n} attempt{'s'[: n > 1]}; check that the server is up, then run again"
    raise RetryableError(message, failure.kind, failure.wait_s) from failure


def _close_all(loops: Mapping[asyncio.AbstractEventLoop, _PerLoop], pid: int) -> None:
    """Close the connections of a client that is garbage, or still open when the process ends."""
    try:
        running: object = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    for loop, local in list(loops.items()):
        if pid == os.getpid() and loop.is_running():
            closing = asyncio.run_coroutine_threadsafe(local.session.close(), loop)
            if loop is not running:
                with suppress(TimeoutError):
                    closing.result(timeout=2)
