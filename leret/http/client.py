"""An HTTP client for interchangeable servers.

It limits concurrency, picks the least busy server, and retries on failures.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import re
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from leret.core.errors import LeretError
from leret.core.types import json_encoder
from leret.http.endpoints import (
    ApiKey,
    Clock,
    Endpoint,
    EndpointPool,
    RateLimit,
    Slots,
    checked_urls,
)

if TYPE_CHECKING:
    import aiohttp

    from leret.http.usage import FaultMeter

_LOG = logging.getLogger("leret")

T = TypeVar("T")

CONNECT_SHARE = 0.4
"""Fraction of an attempt's timeout allowed for connecting.

A server that has not accepted by then counts as down.
"""

_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0
_UNUSABLE = frozenset({"malformed", "incomplete"})
_MAX_UNUSABLE = 3  # unusable answers to a request before the client gives up
_CHECK_LOG = "check the server's log and settings"
_ADVICE = {
    "timeout": "increase timeout_s or lower concurrency",
    "rate_limit": "lower concurrency",
    "malformed": _CHECK_LOG,
    "incomplete": _CHECK_LOG,
}
_MAX_SERVER_ERRORS = 5  # the same for server errors while the server answers other requests

encode_json = json_encoder(separators=(",", ":"), ensure_ascii=False)

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""Exceptions raised by code that reads an answer with an unexpected structure."""

MAX_BYTES = 64 * 2**20
"""Maximum size of a decompressed answer.

It is enough for 64 completions of 8,000 tokens with log-probabilities.
"""

_MAX_RETRY_AFTER_S = 120.0
_RETRIED = frozenset({408, 409, 424, 425, 429})  # TGI sends 424 if generation failed
_PERMANENT = re.compile(
    r"(?i)jinja|chat.template|roles? must|not supported|unsupported|does not support|unrecognized|not permitted"
    r"|unknown (parameter|argument|field)|invalid.request|not implemented|validation error|context.(length|size|window)"
)
"""Error messages that some servers send with status 500 for a request that will never succeed."""

_KINDS = {429: "rate_limit", 503: "overloaded", 408: "timeout", 504: "timeout"}


class HttpError(LeretError):
    """A request failed. Callers of `Client` convert it to another error, such as PolicyError."""

    kind: str = "rejected"


class RetryableError(HttpError):
    """A failure that a retry may fix, after ``wait_s`` seconds if the server sent Retry-After.

    Kinds: rate_limit, overloaded, server, timeout, connection, malformed, incomplete (a cut-off
    completion).
    """

    exit_code = 1

    def __init__(self, reason: str, kind: str = "server", wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.wait_s = wait_s


class RejectedError(HttpError):
    """A request that the server will never accept; ``status`` is 0 if the request was not sent."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Call:
    """A request without the base URL. The body is JSON, form data or empty."""

    method: str
    path: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    form: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Answer:
    """A complete answer. ``url`` omits the query string, which may contain a key."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @cached_property
    def json(self) -> Any:
        """The parsed body; raises RetryableError if the body is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise self.malformed(f"invalid JSON ({error})") from error

    def malformed(self, fault: str) -> RetryableError:
        """Return the error for a successful answer with an unusable body."""
        return RetryableError(f"{self.url} sent {fault}: {one_line(self.body)}", "malformed")

    def check(self, advice: Mapping[bool, str]) -> None:
        """Raise RetryableError for 429, a timeout or a server error; else RejectedError.

        ``advice`` holds what to fix after a rejection: ``advice[True]`` for status 401 or 403, else
        ``advice[False]``.
        """
        if 200 <= self.status < 300:
            return
        reason = f"{self.url} answered {self.status}: {error_text(self.body)}"
        is_permanent = self.status == 501 or (self.status == 500 and _PERMANENT.search(reason))
        if self.status in _RETRIED or (self.status >= 500 and not is_permanent):
            raise RetryableError(
                reason, _KINDS.get(self.status, "server"), retry_after_s(self.headers)
            )
        raise RejectedError(f"{reason}; {advice[self.status in {401, 403}]}", self.status)


@dataclass(slots=True)
class _PerLoop:
    # Objects that cannot be shared between event loops.
    session: aiohttp.ClientSession
    slots: Slots
    pool: EndpointPool


class Client:
    """A client that retries requests until they are answered.

    Args:
        setting: section of the recipe, ``policy`` or ``retriever``; used in messages.
        key: sent in a header; it is removed from messages.
        timeout_s: timeout of each attempt.
        retry_for_s: retries end this many seconds after the request or a later answer of any
            server; 0 means no retry.
        concurrency: maximum number of requests in flight per event loop; time-outs lower it for a
            while (`Slots`).
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        setting: str,
        key: ApiKey | None = None,
        timeout_s: float = 60.0,
        retry_for_s: float = 300.0,
        concurrency: int = 32,
        rate: RateLimit | None = None,
        meter: FaultMeter | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.urls = checked_urls(urls, f"{setting}.urls")
        self._setting = setting
        self.key = key or ApiKey()
        self._advice = {
            True: f"fix the key (api_key_env or token_env of the {setting})",
            False: f"fix {setting}.urls or other {setting} settings",
        }
        self._timeout_s = timeout_s
        self._retry_for_s = retry_for_s
        self._concurrency = concurrency
        self._rate = rate
        self._meter = meter
        self._clock = clock
        self._sleep = sleep
        self._answered_at = float("-inf")  # time of the last answer
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _PerLoop] = (
            weakref.WeakKeyDictionary()
        )
        weakref.finalize(self, _close_all, self._loops, os.getpid())

    async def request(
        self,
        call: Call,
        read: Callable[[Answer], T],
        *,
        timeout_s: float | None = None,
        retry_for_s: float | None = None,
    ) -> T:
        """Send a request until it succeeds.

        Raise RejectedError at once, and RetryableError when retries end.

        An attempt also fails if ``read`` raises `HttpError` or one of `MALFORMED`.
        """
        local = self._loops.get(asyncio.get_running_loop()) or self._open()
        began = self._clock()
        deadline = math.inf
        n = 0
        n_unusable = 0
        n_errors = 0
        while True:
            n += 1
            try:
                return await self._attempt(local, call, read, timeout_s or self._timeout_s)
            except RetryableError as error:
                failure = error
            if n == 1:
                left_s = self._retry_for_s if retry_for_s is None else retry_for_s
                # in an outage, most requests of a large batch wait for a slot: count from the last
                # answer; a slow server gets a second attempt with fewer requests in flight
                is_slow = failure.kind == "timeout"
                since = self._clock() if is_slow else max(began, self._answered_at)
                deadline = since + left_s
            backoff_s = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2.0 ** min(n - 1, 16))
            wait_s = max(backoff_s * random.uniform(0.5, 1.5), local.pool.opens_in_s())
            n_unusable += failure.kind in _UNUSABLE
            n_errors += failure.kind == "server" and self._answered_at > began
            is_permanent = n_unusable == _MAX_UNUSABLE or n_errors == _MAX_SERVER_ERRORS
            if is_permanent or self._clock() + wait_s > deadline:
                attempts = "1 attempt" if n == 1 else f"{n} attempts"
                advice = _ADVICE.get(failure.kind, "check that the server is up")
                if is_permanent:
                    advice = _CHECK_LOG
                why = f"{failure}; gave up after {attempts}; {advice}, then run again"
                raise RetryableError(why, failure.kind, failure.wait_s) from failure
            if self._meter is not None:
                self._meter.count("retries")
            if failure.kind == "timeout":
                _tell_slow(self.urls, self._setting, timeout_s or self._timeout_s)
            _LOG.info("%s; attempt %d in %.3g s", failure, n + 1, wait_s)
            await self._sleep(wait_s)

    async def aclose(self) -> None:
        """Close the connections of the running event loop. A second call does nothing."""
        local = self._loops.pop(asyncio.get_running_loop(), None)
        if local is not None:
            await local.session.close()

    async def _attempt(
        self, local: _PerLoop, call: Call, read: Callable[[Answer], T], timeout_s: float
    ) -> T:
        async with local.slots:
            endpoint = local.pool.take() if self._rate is None else None
            if endpoint is None:
                endpoint = await self._turn(local.pool)
            sent = self._clock()
            try:
                answer = await _by_aiohttp(local.session, call, endpoint.url, timeout_s)
                if not 200 <= answer.status < 300:
                    answer.check(self._advice)
                try:
                    value = read(answer)
                except MALFORMED as error:
                    raise answer.malformed(
                        f"an answer in an unexpected format ({one_line(repr(error))})"
                    ) from error
            except HttpError as error:
                error.args = (self.key.redact(str(error)),)
                if isinstance(error, RetryableError):
                    local.pool.failed(endpoint, sent, error.kind, error.wait_s)
                    if error.kind == "timeout":
                        await local.slots.timed_out(sent)
                if self._meter is not None:
                    self._meter.count(f"fault_{error.kind}")
                raise
            finally:
                endpoint.n_in_flight -= 1
            endpoint.n_failures = 0
            endpoint.paused_until = 0.0
            self._answered_at = self._clock()
            if local.slots.limit < local.slots.most:
                local.slots.answered()
            return value

    async def _turn(self, pool: EndpointPool) -> Endpoint:
        while self._rate is not None and (wait_s := self._rate.wait_s()) > 0:
            await self._sleep(wait_s)
        while (endpoint := pool.take()) is None:
            await self._sleep(pool.opens_in_s())
        return endpoint

    def _open(self) -> _PerLoop:
        import aiohttp

        session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json", **self.key.headers()},
            connector=aiohttp.TCPConnector(limit=0),  # `slots` is the limit
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        slots = Slots(self._concurrency, self._clock)
        pool = EndpointPool(self.urls, self._clock)
        local = _PerLoop(session, slots, pool)
        self._loops[asyncio.get_running_loop()] = local
        return local


async def _by_aiohttp(
    session: aiohttp.ClientSession, call: Call, base: str, timeout_s: float
) -> Answer:
    import aiohttp
    from yarl import URL

    url = base + call.path
    body = bytearray()
    query = f"?{urlencode(call.params, errors='replace', quote_via=quote)}" if call.params else ""
    # UTF-8 cannot encode lone surrogates: escape them in JSON, replace them in form data.
    form = None if call.form is None else urlencode(call.form, errors="replace").encode()
    data = form if call.json is None else encode_json(call.json).encode("utf-8", "backslashreplace")
    try:
        async with session.request(
            call.method,
            URL(url + query, encoded=True),
            data=data,
            headers=None if form is None else {"Content-Type": "application/x-www-form-urlencoded"},
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_SHARE * timeout_s),
        ) as response:
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise RejectedError(
                        f"{url} sent more than {MAX_BYTES} bytes; request less per call", 200
                    ).failed()
            return Answer(url, response.status, response.headers, bytes(body))
    except (aiohttp.ClientError, ConnectionError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise RetryableError(f"{url} cannot be reached ({cause})", "connection") from error
    except TimeoutError as error:
        raise RetryableError(f"{url} did not answer within {timeout_s:.3g} s", "timeout") from error


@cache
def _tell_slow(urls: Sequence[str], setting: str, timeout_s: float) -> None:
    _LOG.warning(
        "%s: the server needs more than %s.timeout_s (%g s) per request; raise it or lower "
        "%s.concurrency. Until it answers in time, leret sends fewer requests at once",
        ", ".join(urls),
        setting,
        timeout_s,
        setting,
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in the ``Retry-After`` header, at most 120; None if missing or invalid.

    >>> retry_after_s({"Retry-After": "1.5"})
    1.5
    """
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value)
            seconds = (moment - datetime.now(UTC if moment.tzinfo else None)).total_seconds()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


def error_text(body: str | bytes) -> str:
    """Return the error message in the body of a failed request, as one line."""
    try:
        value = json.loads(body)
        if isinstance(value, dict) and isinstance(value.get("error"), dict):
            value = value["error"]
        texts = (
            [value.get(key) for key in ("message", "error", "detail")]
            if isinstance(value, dict)
            else []
        )
        text = next((text for text in texts if isinstance(text, str)), str(value))
        if isinstance(value, dict) and isinstance(value.get("param"), str):
            text += f" (param: {value['param']})"
        return one_line(text)
    except MALFORMED:
        return one_line(body)


def one_line(text: str | bytes) -> str:
    """Return text as one line, cut after 300 characters."""
    if isinstance(text, bytes):
        text = text[:2000].decode(errors="replace")
    line = " ".join(text[:2000].split())
    return line if len(line) <= 300 else f"{line[:300]}..."


def _close_all(loops: Mapping[asyncio.AbstractEventLoop, _PerLoop], pid: int) -> None:
    """Close a client's connections when it is garbage-collected or the process exits."""
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
