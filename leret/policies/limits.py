"""How many requests a server gets at a time: as many as it can use, found by trying."""

from __future__ import annotations

import math

__all__ = ["AdaptiveLimit"]

_START = 32
_WINDOW = 32
_TOLERANCE = 2.0
_TRIAL = 0.75
_FORGET = 1.02


class AdaptiveLimit:
    """Additive increase, multiplicative decrease.

    The limit doubles a round trip until the first trouble, and grows by one a round trip after it, as long as it is
    used. Overload (429, 503, a time-out) cuts it, once for all requests that were under way together. Latency twice the
    moving minimum cuts it on trial: where a shorter queue answers sooner and as many a second, the cut stays; where it
    does not, the prompts have changed, not the server, and the cut is taken back. A server that batches is slower with
    more requests and does more of them, so latency alone says nothing.

    Args:
        most: the limit's upper bound.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.value = float(min(most, _START))
        self._doubling = True
        self._cut_at = -math.inf
        self._least_s = math.inf
        self._trial: tuple[float, float, float] | None = None
        self._restart()

    def answered(self, began: float, now: float, used: bool) -> None:
        """A request succeeded.

        Args:
            began: when it was sent, in seconds of any clock that never goes back.
            now: on the same clock.
            used: as many requests as the limit allows were in flight.
        """
        if used:
            self._n_used += 1
            if self.value < self.most and self._trial is None:
                self.value = min(self.most, self.value + (1.0 if self._doubling else 1.0 / self.value))
        if began < self._cut_at:
            return  # its latency is of the limit before
        if self._began is None:
            self._began, self._n_used = now, 0  # a rate is of the time between answers
            return
        self._n += 1
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
        self._cut(now, keep)

    def _cut(self, now: float, keep: float) -> None:
        self.value = max(1.0, self.value * keep)
        self._cut_at = now
        self._trial = None
        self._restart()

    def _look(self, now: float) -> None:
        """A window is full: compare it with what was usual."""
        mean_s, rate = self._sum_s / self._n, self._n / max(1e-9, now - (self._began or 0.0))
        steady = self._n_used >= 0.8 * self._n
        self._restart()
        if not steady:
            return
        if self._trial is not None:
            before, before_s, before_rate = self._trial
            self._trial = None
            if mean_s > 0.9 * before_s or rate < 0.97 * before_rate:
                self.value = before
                self._least_s = mean_s
                return
        elif mean_s > _TOLERANCE * self._least_s and self.value > 1:
            self._doubling = False
            kept = self.value, mean_s, rate
            self._cut(now, _TRIAL)
            self._trial = kept
            return
        self._least_s = min(self._least_s * _FORGET, mean_s)

    def _restart(self) -> None:
        self._n = self._n_used = 0
        self._sum_s = 0.0
        self._began: float | None = None
        self._size = max(_WINDOW, 2 * int(self.value))
