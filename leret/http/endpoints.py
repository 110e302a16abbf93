"""Equal servers of one client, and rate limits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from urllib.parse import urlsplit

from leret.core.errors import ConfigError
from leret.http.answers import HttpError, RetryableError

Clock = Callable[[], float]

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_BLAMELESS = frozenset({"rate_limit", "incomplete"})  # failures of a server that is up


@dataclass(slots=True, eq=False)
class Endpoint:
    """One base URL and its recent failures."""

    url: str
    n_in_flight: int = 0
    n_failures: int = 0
    failed_at: float = float("-inf")
    paused_until: float = 0.0  # out of rotation after a failure, unless all others have failed too
    closed_until: float = 0.0  # the server refuses requests before then (Retry-After)


class EndpointPool:
    """The endpoints of a client: a request takes the least busy one; each failure pauses a server for longer."""

    def __init__(self, urls: Sequence[str], clock: Clock = time.monotonic) -> None:
        self.all = [Endpoint(url) for url in urls]
        self._clock = clock

    def take(self) -> Endpoint | None:
        """Take an endpoint for a request, to be released by `succeeded` or `failed`; None if all are closed."""
        endpoint: Endpoint | None = self.all[0] if len(self.all) == 1 else self._best()
        if endpoint is None or (endpoint.closed_until and endpoint.closed_until > self._clock()):
            return None
        endpoint.n_in_flight += 1
        return endpoint

    def opens_in_s(self) -> float:
        """Return the seconds until `take` returns an endpoint."""
        if self._best() is not None:
            return 0.0
        opens = min(max(endpoint.closed_until, endpoint.paused_until) for endpoint in self.all)
        return max(0.01, opens - self._clock())

    def succeeded(self, endpoint: Endpoint) -> None:
        """Release an endpoint after an answer."""
        endpoint.n_in_flight -= 1
        if endpoint.n_failures:
            endpoint.n_failures, endpoint.paused_until = 0, 0.0

    def failed(self, endpoint: Endpoint, began: float, failure: HttpError) -> None:
        """Release an endpoint after a failure; a request that ``began`` before its last failure counts as that one."""
        if not isinstance(failure, RetryableError):
            self.succeeded(endpoint)  # the server is up; the request is wrong
            return
        now = self._clock()
        endpoint.n_in_flight -= 1
        if failure.wait_s:
            # A random delay spreads the next requests of all clients.
            wait_s = failure.wait_s * random.uniform(1.0, 1.1)
            endpoint.closed_until = max(endpoint.closed_until, now + wait_s)
        if failure.kind not in _BLAMELESS and began >= endpoint.failed_at:
            endpoint.paused_until = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**endpoint.n_failures)
            endpoint.n_failures += 1
            endpoint.failed_at = now

    def _best(self) -> Endpoint | None:
        now = self._clock()
        candidates = [endpoint for endpoint in self.all if endpoint.closed_until <= now]
        if all(endpoint.n_failures for endpoint in self.all):
            return min(candidates, key=lambda endpoint: endpoint.paused_until, default=None)
        for endpoint in candidates:
            if endpoint.n_failures and endpoint.paused_until <= now and not endpoint.n_in_flight:
                return endpoint  # one request tests the server after its pause
        healthy = (endpoint for endpoint in candidates if not endpoint.n_failures)
        return min(healthy, key=lambda endpoint: endpoint.n_in_flight, default=None)


def checked_urls(urls: Sequence[str], setting: str) -> tuple[str, ...]:
    """Return base URLs without a trailing slash; ConfigError for an empty list or an invalid URL."""
    if not urls:
        raise ConfigError(f"{setting} is empty; name the server's base URL, as in http://127.0.0.1:8000")
    for url in urls:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.query or parts.fragment or any(char.isspace() for char in url):
            raise ConfigError(f"{setting}: {url!r} is not a URL; write it as in http://127.0.0.1:8000")
    return tuple(url.rstrip("/") for url in urls)


class RateLimit:
    """A rate limit: requests start at least ``1 / per_s`` seconds apart. Safe for threads and event loops."""

    def __init__(self, per_s: float, clock: Clock = time.monotonic) -> None:
        self.per_s = per_s
        self._clock = clock
        self._lock = Lock()
        self._next = float("-inf")

    def wait_s(self) -> float:
        """Return 0 to start a request now, else the seconds until the next try."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                return self._next - now
            self._next = now + 1.0 / self.per_s
            return 0.0


@cache
def shared_rate(url: str, per_s: float) -> RateLimit:
    """Return the limit that all clients of a site in this process share."""
    return RateLimit(per_s)
