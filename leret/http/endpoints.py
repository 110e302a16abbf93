"""Equal servers of one client, and the rate at which they may be asked."""

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

_FIRST_REST_S = 0.5
_LONGEST_REST_S = 30.0
_BLAMELESS = frozenset({"rate_limit", "incomplete"})
"""Failures that say nothing about the server."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """One base URL and how it has been doing.

    Attributes:
        resting_until: out of rotation after a failure; asked all the same where no other is left.
        closed_until: the server asked for no request before then (Retry-After).
    """

    url: str
    n_in_flight: int = 0
    n_failures: int = 0
    failed_at: float = float("-inf")
    resting_until: float = 0.0
    closed_until: float = 0.0


class EndpointPool:
    """Gives each request the least busy server; one that fails rests, longer each time, until a request succeeds."""

    def __init__(self, urls: Sequence[str], clock: Clock = time.monotonic) -> None:
        self.all = [Endpoint(url) for url in urls]
        self._clock = clock

    def take(self) -> Endpoint | None:
        """The endpoint for a request now, to be handed back; None where every one is closed."""
        endpoint: Endpoint | None = self.all[0] if len(self.all) == 1 else self._best()
        if endpoint is None or (endpoint.closed_until and endpoint.closed_until > self._clock()):
            return None
        endpoint.n_in_flight += 1
        return endpoint

    def opens_in_s(self) -> float:
        """Seconds until `take` gives an endpoint."""
        if self._best() is not None:
            return 0.0
        opens = min(max(endpoint.closed_until, endpoint.resting_until) for endpoint in self.all)
        return max(0.01, opens - self._clock())

    def succeeded(self, endpoint: Endpoint) -> None:
        """A request to it was answered."""
        endpoint.n_in_flight -= 1
        if endpoint.n_failures:
            endpoint.n_failures, endpoint.resting_until = 0, 0.0

    def failed(self, endpoint: Endpoint, began: float, failure: HttpError) -> None:
        """A request to it failed; ``began`` is when: what was sent before the last failure is part of that one."""
        if not isinstance(failure, RetryableError):
            self.succeeded(endpoint)  # the server is well; the request is not
            return
        now = self._clock()
        endpoint.n_in_flight -= 1
        if failure.wait_s:
            # Later by a little, so that not everybody comes back in the same moment.
            wait_s = failure.wait_s * random.uniform(1.0, 1.1)
            endpoint.closed_until = max(endpoint.closed_until, now + wait_s)
        if failure.kind not in _BLAMELESS and began >= endpoint.failed_at:
            endpoint.resting_until = now + min(_LONGEST_REST_S, _FIRST_REST_S * 2.0**endpoint.n_failures)
            endpoint.n_failures += 1
            endpoint.failed_at = now

    def _best(self) -> Endpoint | None:
        now = self._clock()
        candidates = [endpoint for endpoint in self.all if endpoint.closed_until <= now]
        if all(endpoint.n_failures for endpoint in self.all):
            return min(candidates, key=lambda endpoint: endpoint.resting_until, default=None)
        for endpoint in candidates:
            if endpoint.n_failures and endpoint.resting_until <= now and not endpoint.n_in_flight:
                return endpoint  # rested: one request shows whether it is well again
        well = (endpoint for endpoint in candidates if not endpoint.n_failures)
        return min(well, key=lambda endpoint: endpoint.n_in_flight, default=None)


def checked_urls(urls: Sequence[str], setting: str) -> tuple[str, ...]:
    """Base URLs without a slash at the end; ConfigError where there is none, or one is no URL."""
    if not urls:
        raise ConfigError(f"{setting} is empty; give the server's base URL, as in http://127.0.0.1:8000")
    for url in urls:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.query or parts.fragment or any(char.isspace() for char in url):
            raise ConfigError(f"{setting}: {url!r} is no URL; write it as in http://127.0.0.1:8000")
    return tuple(url.rstrip("/") for url in urls)


class RateLimit:
    """Lets requests start at least ``1 / per_s`` seconds apart; safe for many threads and event loops."""

    def __init__(self, per_s: float, clock: Clock = time.monotonic) -> None:
        self.per_s = per_s
        self._clock = clock
        self._lock = Lock()
        self._next = float("-inf")

    def wait_s(self) -> float:
        """0 where a request may start now, and must; else seconds after which to ask again."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                return self._next - now
            self._next = now + 1.0 / self.per_s
            return 0.0


@cache
def shared_rate(url: str, per_s: float) -> RateLimit:
    """The limit that all clients of a site share in this process."""
    return RateLimit(per_s)
