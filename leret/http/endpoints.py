"""Addresses, a client's interchangeable servers, API keys, rate limits and requests in flight."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from urllib.parse import urlsplit

from leret.core.errors import ConfigError

Clock = Callable[[], float]

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_ANSWERS_PER_SLOT = 4  # more would fill a slow server again within seconds
_BLAMELESS = frozenset({"rate_limit", "incomplete"})  # failures that do not mean the server is down


@dataclass(frozen=True, slots=True)
class Listening:
    """Address that a server listens on."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Base URL for clients on this machine, without /v1."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        if ":" in host and "[" not in host:
            host = f"[{host}]"
        return f"http://{host}:{self.port}"


@dataclass(slots=True, eq=False)
class Endpoint:
    """One base URL and its recent failures."""

    url: str
    n_in_flight: int = 0
    n_failures: int = 0
    failed_at: float = float("-inf")
    # after a failure, no requests until then, unless all endpoints have failed
    paused_until: float = 0.0
    closed_until: float = 0.0  # the server refuses requests until then (Retry-After)


class EndpointPool:
    """Endpoints of a client. A request goes to the least busy one.

    Each failure in a row pauses a server for longer.
    """

    def __init__(self, urls: Sequence[str], clock: Clock = time.monotonic) -> None:
        self.all = [Endpoint(url) for url in urls]
        self._clock = clock

    def take(self) -> Endpoint | None:
        """Return an endpoint to use now, or None.

        After the request, the caller must decrement its ``n_in_flight``.
        """
        endpoint: Endpoint | None = self.all[0] if len(self.all) == 1 else self._best()
        if endpoint is None or (endpoint.closed_until and endpoint.closed_until > self._clock()):
            return None
        endpoint.n_in_flight += 1
        return endpoint

    def opens_in_s(self) -> float:
        """Return the seconds until `take` can return an endpoint; 0 if it can now."""
        if self._best() is not None:
            return 0.0
        opens = min(max(endpoint.closed_until, endpoint.paused_until) for endpoint in self.all)
        return max(0.01, opens - self._clock())

    def failed(self, endpoint: Endpoint, began: float, kind: str, wait_s: float | None) -> None:
        """Record a server's failure.

        A request that ``began`` before its last failure does not lengthen its pause.
        """
        now = self._clock()
        if wait_s:
            # The random extra delay keeps clients from retrying at the same moment.
            endpoint.closed_until = max(
                endpoint.closed_until, now + wait_s * random.uniform(1.0, 1.1)
            )
        if kind not in _BLAMELESS and began >= endpoint.failed_at:
            endpoint.paused_until = now + min(
                _LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**endpoint.n_failures
            )
            endpoint.n_failures += 1
            endpoint.failed_at = now

    def _best(self) -> Endpoint | None:
        now = self._clock()
        candidates = [endpoint for endpoint in self.all if endpoint.closed_until <= now]
        if all(endpoint.n_failures for endpoint in self.all):
            return min(candidates, key=lambda endpoint: endpoint.paused_until, default=None)
        for endpoint in candidates:
            if endpoint.n_failures and endpoint.paused_until <= now and not endpoint.n_in_flight:
                return endpoint  # after the pause, a single request tests the server
        healthy = (endpoint for endpoint in candidates if not endpoint.n_failures)
        return min(healthy, key=lambda endpoint: endpoint.n_in_flight, default=None)


class Slots(asyncio.Semaphore):
    """Limit on the requests in flight of one event loop.

    A time-out halves the limit, because a server that is too slow for its load would start the same
    requests over and over. Answers raise the limit again, one slot for `_ANSWERS_PER_SLOT` answers
    per slot, up to ``n``.

    Source: additive increase, multiplicative decrease: Chiu and Jain 1989, doi
    10.1016/0169-7552(89)90019-6.
    """

    def __init__(self, n: int, clock: Clock = time.monotonic) -> None:
        super().__init__(n)
        self.limit = n
        self.most = n
        self._clock = clock
        self._n_surplus = 0  # requests in flight above the limit
        self._n_answers = 0  # since the limit changed
        self._lowered_at = float("-inf")

    def release(self) -> None:
        if self._n_surplus:
            self._n_surplus -= 1
        else:
            super().release()

    def answered(self) -> None:
        """Count an answer below the highest limit, and raise the limit if it is due."""
        self._n_answers += 1
        if self._n_answers >= _ANSWERS_PER_SLOT * self.limit:
            self.limit += 1
            self._n_answers = 0
            self.release()

    async def timed_out(self, sent: float) -> None:
        """Halve the requests in flight, unless the request was ``sent`` before the last time."""
        if sent < self._lowered_at:
            return
        n_in_flight = self.limit + self._n_surplus
        while not self.locked():  # free slots
            await self.acquire()
            n_in_flight -= 1
        self.limit = max(1, min(self.limit, n_in_flight) // 2)
        self._n_surplus = n_in_flight - self.limit
        self._n_answers = 0
        self._lowered_at = self._clock()


class ApiKey:
    """A bearer token, ``Basic`` credentials or None. The key is never printed or pickled."""

    __slots__ = ("_value",)

    def __init__(self, value: str | None = None) -> None:
        self._value = value

    @classmethod
    def from_env(cls, variable: str | None, setting: str) -> ApiKey:
        """Read the key from the environment ``variable``, if not None.

        Raise ConfigError if it is unset or invalid.
        """
        if variable is None:
            return cls()
        value = os.environ.get(variable, "").strip()
        if not value:
            raise ConfigError(
                f"{setting}: the environment variable {variable} is not set; export the key"
            )
        if not value.isascii() or not value.isprintable():
            fault = (
                f"the environment variable {variable} contains line breaks or other characters "
                "not allowed in headers"
            )
            raise ConfigError(f"{setting}: {fault}; export only the key")
        return cls(value)

    def __repr__(self) -> str:
        return "ApiKey()" if self._value is None else "ApiKey([key])"

    def __reduce__(self) -> str:
        raise TypeError("a key cannot be pickled; read it from the environment")

    def reveal(self) -> str | None:
        return self._value

    def headers(self) -> dict[str, str]:
        if self._value is None:
            return {}
        return {
            "Authorization": self._value
            if self._value.startswith("Basic ")
            else f"Bearer {self._value}"
        }

    def redact(self, message: str) -> str:
        """Remove the key from a message, even if `one_line` cut off the end of the key.

        >>> ApiKey("s3cret").redact("key s3cret: no; key s3cr...")
        'key [key]: no; key [key]...'
        """
        if self._value is None:
            return message
        secret = self._value.removeprefix("Basic ")
        message = message.replace(secret, "[key]")
        for n in range(len(secret) - 1, 2, -1):
            message = message.replace(f"{secret[:n]}...", "[key]...")
        return message


def checked_urls(urls: Sequence[str], setting: str) -> tuple[str, ...]:
    """Return base URLs without a trailing slash.

    Raise ConfigError for an empty list or an invalid URL.
    """
    for url in urls:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.query or parts.fragment or any(char.isspace() for char in url):
            raise ConfigError(
                f"{setting}: {url!r} is not a base URL; write it like http://127.0.0.1:8000"
            )
    return tuple(url.rstrip("/") for url in urls)


class RateLimit:
    """Keeps requests at least ``1 / per_s`` seconds apart, also across threads and event loops."""

    def __init__(self, per_s: float, clock: Clock = time.monotonic) -> None:
        self.per_s = per_s
        self._clock = clock
        self._lock = Lock()
        self._next = float("-inf")

    def wait_s(self) -> float:
        """Return 0 if a request may start now, else the seconds to wait before calling again."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                return self._next - now
            self._next = now + 1.0 / self.per_s
            return 0.0


@cache
def shared_rate(url: str, per_s: float) -> RateLimit:
    """Return the rate limit that all clients of a site share in this process."""
    return RateLimit(per_s)
