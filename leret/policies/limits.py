"""How many requests a server gets at a time: as many as it can use, found by trying."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AdaptiveLimit"]

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
