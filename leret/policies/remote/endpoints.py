"""How many requests a server gets at a time: as many as it can use, found by trying."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_START = 32
_WINDOW = 32
_TOLERANCE = 2.0
_NOTICED_S = 0.25
_TRIAL = 0.75
_FORGET = 1.02


@dataclass(frozen=True, slots=True)
class _Trial:
    """A limit in doubt, and how it did when it was held; no latency where it is held now."""

    limit: float
    mean_s: float | None = None
    rate: float = 0.0


class AdaptiveLimit:
    """Additive increase, multiplicative decrease.

    The limit doubles a round trip until the first trouble, and grows by one a round trip after it, as long as it is
    used. Overload (429, 503, a time-out) cuts it, once for all requests that were under way together. Latency twice the
    moving minimum, and of a quarter of a second at least, puts it on trial: it is held, then cut by a quarter, a window
    of answers each. Where the shorter queue answers sooner and as many a second, the cut stays; where it does not, the
    prompts have changed or the server batches, and it is taken back. Latency alone says nothing: a server that batches
    is slower with more requests, and does more of them.

    Args:
        most: the limit's upper bound.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.value = float(min(most, _START))
        self._doubling = True
        self._cut_at = -math.inf
        self._least_s = math.inf
        self._trial: _Trial | None = None
        self._first: float | None = None
        self._size = _WINDOW
        self._measure(-math.inf)

    def answered(self, began: float, now: float, used: bool) -> None:
        """A request succeeded.

        Args:
            began: when it was sent, in seconds of any clock that never goes back.
            now: on the same clock.
            used: as many requests as the limit allows were in flight.
        """
        if used and self.value < self.most and self._trial is None:
            self.value = min(self.most, self.value + (1.0 if self._doubling else 1.0 / self.value))
        if began < self._since:
            return  # its latency is of another limit
        if self._first is None:
            self._first = now  # a rate is of the time between answers
            return
        self._n += 1
        self._n_used += used
        self._sum_s += now - began
        if self._n >= self._size:
            self._look(now)

    def overloaded(self, began: float, now: float, keep: float) -> None:
        """The server said, or showed, that it has too much to do.

        Args:
            began: when the request was sent; what was sent before the last cut is no news.
            now: on the same clock.
            keep: share of the limit that stays.
        """
        self._doubling = False
        if began < self._cut_at:
            return
        self.value = max(1.0, self.value * keep)
        self._cut_at = now
        self._trial = None
        self._measure(now)

    def _look(self, now: float) -> None:
        """A window is full: compare it with what was usual."""
        mean_s, rate = self._sum_s / self._n, self._n / max(1e-9, now - (self._first or 0.0))
        used = self._n_used >= 0.8 * self._n
        trial, self._trial = self._trial, None
        if used and trial is not None:
            if trial.mean_s is None:
                self._trial = _Trial(self.value, mean_s, rate)
                self.value = max(1.0, self.value * _TRIAL)
            elif mean_s > 0.9 * trial.mean_s or rate < 0.97 * trial.rate:
                self.value, self._least_s = trial.limit, trial.mean_s
        elif used and mean_s > max(_NOTICED_S, _TOLERANCE * self._least_s) and self.value > 1:
            self._doubling = False
            self._trial = _Trial(self.value)
        elif used:
            self._least_s = min(self._least_s * _FORGET, mean_s)
        elif trial is not None:
            self.value = trial.limit
        self._measure(now if used and (trial or self._trial) else self._since)

    def _measure(self, since: float) -> None:
        """A new window, of requests that were sent from then on."""
        self._since = since
        self._n = self._n_used = 0
        self._sum_s = 0.0
        self._first = None
        self._size = max(_WINDOW, 2 * int(self.value))


pass


_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_KEEP = {"rate_limit": 0.7, "overloaded": 0.7, "timeout": 0.5}
"""What stays of an endpoint's limit after each kind of overload."""


@dataclass(slots=True)
class Endpoint:
    """One base URL and how it has been doing.

    Attributes:
        resting_until: out of rotation after a failure; asked all the same where no other is left.
        closed_until: the server asked for no request before then (Retry-After).
    """

    url: str
    limit: AdaptiveLimit
    n_in_flight: int = 0
    n_failures: int = 0
    failed_at: float = -1.0
    resting_until: float = 0.0
    closed_until: float = 0.0

    @property
    def has_room(self) -> bool:
        """Whether the limit allows another request."""
        return self.n_in_flight < int(self.limit.value)


@dataclass
class Endpoints:
    """The servers of one policy, in one event loop.

    Args:
        urls: base URLs.
        most: requests in flight at most, over all of them.
        clock: seconds, never going back.
    """

    urls: Sequence[str]
    most: int = 2**31
    clock: Callable[[], float] = time.monotonic
    n_in_flight: int = 0
    _waiting: deque[asyncio.Future[Endpoint]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.all = [Endpoint(url, AdaptiveLimit(self.most)) for url in self.urls]

    def take(self) -> Endpoint | None:
        """The endpoint for the next request, if one may be sent now."""
        if self._waiting or self.n_in_flight >= self.most:
            return None
        return self._book()

    async def wait(self) -> Endpoint:
        """The endpoint for the next request, as soon as one may be sent; first come, first served."""
        future: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise

    def release(self, endpoint: Endpoint) -> None:
        """A request is over, and says nothing about the server."""
        endpoint.n_in_flight -= 1
        self.n_in_flight -= 1
        if self._waiting:
            self._admit()

    def answered(self, endpoint: Endpoint, began: float) -> float:
        """A request was answered.

        Returns:
            Its latency in seconds.
        """
        now = self.clock()
        limit = endpoint.limit
        limit.answered(began, now, endpoint.n_in_flight >= int(limit.value) or self.n_in_flight >= self.most)
        if endpoint.n_failures:
            endpoint.n_failures, endpoint.resting_until = 0, 0.0
        self.release(endpoint)
        return now - began

    def failed(self, endpoint: Endpoint, began: float, kind: str, wait_s: float | None, blame: bool) -> None:
        """A request failed; a server that is to blame rests, longer each time, until one succeeds.

        Args:
            endpoint: that it was sent to.
            began: when; what was sent before the last failure is part of it.
            kind: as in `TryAgainError`.
            wait_s: the server's Retry-After.
            blame: whether the server, rather than the traffic on it, is at fault.
        """
        now = self.clock()
        if kind in _KEEP:
            endpoint.limit.overloaded(began, now, _KEEP[kind])
        if wait_s is not None:
            # Later by a little, so that not everybody comes back in the same moment.
            endpoint.closed_until = max(endpoint.closed_until, now + wait_s * random.uniform(1.0, 1.1))
            self._admit_later(endpoint.closed_until - now)
        if blame and began >= endpoint.failed_at:
            endpoint.resting_until = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**endpoint.n_failures)
            endpoint.n_failures += 1
            endpoint.failed_at = now
        self.release(endpoint)

    def _book(self) -> Endpoint | None:
        endpoint = self.all[0] if len(self.all) == 1 else self._best()
        if endpoint is None or not endpoint.has_room:
            return None
        if endpoint.closed_until and self.clock() < endpoint.closed_until:
            return None
        endpoint.n_in_flight += 1
        self.n_in_flight += 1
        return endpoint

    def _best(self) -> Endpoint | None:
        now = self.clock()
        open_ = [endpoint for endpoint in self.all if endpoint.closed_until <= now and endpoint.has_room]
        if not any(endpoint.n_failures == 0 for endpoint in self.all):
            return min(open_, key=lambda endpoint: endpoint.resting_until, default=None)
        for endpoint in open_:
            if endpoint.n_failures and endpoint.resting_until <= now and not endpoint.n_in_flight:
                return endpoint  # rested: one request shows whether it is well again
        well = [endpoint for endpoint in open_ if not endpoint.n_failures]
        return min(well, key=lambda endpoint: endpoint.n_in_flight / endpoint.limit.value, default=None)

    def _admit(self) -> None:
        while self._waiting and self.n_in_flight < self.most:
            if self._waiting[0].done():  # cancelled meanwhile
                self._waiting.popleft()
                continue
            endpoint = self._book()
            if endpoint is None:
                return
            self._waiting.popleft().set_result(endpoint)

    def _admit_later(self, seconds: float) -> None:
        try:
            asyncio.get_running_loop().call_later(seconds + 0.001, self._admit)
        except RuntimeError:  # no loop, as in a test of this class alone: `take` looks at the clock by itself
            return
