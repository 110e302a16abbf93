"""How many requests a second a server is sent, by everything in this process together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["RateLimit", "shared_limit"]


class RateLimit:
    """Lets requests start at least ``1 / per_s`` seconds apart; safe for many threads and event loops.

    Args:
        per_s: requests a second.
        clock: seconds, never going back.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next = float("-inf")

    def wait_s(self) -> float:
        """Ask to start now.

        Returns:
            0 where the request may start, and must: the next one is then held back. Otherwise, seconds after which to
            ask again: a place is never held for one that sleeps, who may wake late, on top of the next one.
        """
        with self._lock:
            now = self._clock()
            if now < self._next:
                return self._next - now
            self._next = now + 1.0 / self.per_s
            return 0.0

    def pause(self, seconds: float) -> None:
        """Let nobody start for a while: the server asked for it."""
        with self._lock:
            self._next = max(self._next, self._clock() + seconds)


_shared: dict[str, RateLimit] = {}
_shared_lock = threading.Lock()


def shared_limit(name: str, per_s: float) -> RateLimit:
    """The limit of a server (and of a key for it), one for the whole process; the lowest rate asked for holds."""
    with _shared_lock:
        limit = _shared.setdefault(name, RateLimit(per_s))
        limit.per_s = min(limit.per_s, per_s)
        return limit
