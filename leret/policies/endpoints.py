"""Which of several servers gets the next request: the least busy one that is not out of rotation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Endpoint", "Endpoints"]

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@dataclass
class Endpoint:
    """One base URL and how it has been doing."""

    url: str
    n_in_flight: int = 0
    n_failures: int = 0
    resting_until: float = 0.0


class Endpoints:
    """The servers of one policy.

    Args:
        urls: base URLs ending in /v1.
        clock: seconds, never going back.
    """

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.all = [Endpoint(url.rstrip("/")) for url in urls]

    def take(self) -> Endpoint:
        """The endpoint for the next request; where all of them rest, the one that is back first."""
        now = self._clock()
        awake = [endpoint for endpoint in self.all if endpoint.resting_until <= now]
        if not awake:
            chosen = min(self.all, key=lambda endpoint: endpoint.resting_until)
        else:
            chosen = min(awake, key=lambda endpoint: endpoint.n_in_flight)
        chosen.n_in_flight += 1
        return chosen

    def give_back(self, endpoint: Endpoint, ok: bool) -> None:
        """A request is over; a server that failed rests, longer each time, until one succeeds."""
        endpoint.n_in_flight -= 1
        if ok:
            endpoint.n_failures, endpoint.resting_until = 0, 0.0
            return
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**endpoint.n_failures)
        endpoint.n_failures += 1
        endpoint.resting_until = self._clock() + pause
