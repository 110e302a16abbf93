"""Against servers whose answer times are a formula, so that where the limit must settle is known."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest

from leret.policies.remote.endpoints import AdaptiveLimit


def drive(limit: AdaptiveLimit, latency_s: Callable[[int], float], seconds: float, start: float = 0.0) -> float:
    """Keep the limit full for a while.

    Args:
        limit: that is tried.
        latency_s: of a request, by how many are in flight with it.
        seconds: of the server's time.
        start: on the clock.

    Returns:
        The mean limit of the second half.
    """
    in_flight: list[tuple[float, float]] = []
    now, seen = start, []
    while now < start + seconds:
        while len(in_flight) < int(limit.value):
            heapq.heappush(in_flight, (now + latency_s(len(in_flight) + 1), now))
        used = len(in_flight) >= int(limit.value)
        now, began = heapq.heappop(in_flight)
        limit.answered(began, now, used)
        if now > start + seconds / 2:
            seen.append(limit.value)
    return sum(seen) / len(seen)


def test_the_limit_grows_to_its_bound_where_the_server_keeps_up() -> None:
    limit = AdaptiveLimit(500)
    drive(limit, lambda n: 0.05, 10.0)
    assert limit.value == 500


def test_it_never_passes_its_bound_nor_falls_below_one() -> None:
    limit = AdaptiveLimit(4)
    drive(limit, lambda n: 0.05, 5.0)
    assert limit.value == 4
    for second in range(100, 120):
        limit.overloaded(float(second), second + 0.5, 0.5)
    assert limit.value == 1


def test_requests_that_were_sent_together_cut_it_once() -> None:
    limit = AdaptiveLimit(32)
    for _ in range(20):
        limit.overloaded(began=1.0, now=2.0, keep=0.7)
    assert limit.value == pytest.approx(32 * 0.7)
    limit.overloaded(began=2.5, now=3.0, keep=0.7)
    assert limit.value == pytest.approx(32 * 0.49)


def test_after_the_first_overload_it_grows_by_one_a_round_trip() -> None:
    limit = AdaptiveLimit(1000)
    limit.overloaded(0.0, 1.0, 0.5)
    for _ in range(16):
        limit.answered(1.5, 1.6, used=True)
    assert limit.value == pytest.approx(17, abs=0.1)


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    limit = AdaptiveLimit(100)
    for _ in range(200):
        limit.answered(0.0, 0.1, used=False)
    assert limit.value == 32


def test_a_queue_without_gain_is_kept_short() -> None:
    # 50 requests at a time take 0.1 s; more than that only wait. 500 would wait a second each.
    limit = AdaptiveLimit(500)
    settled = drive(limit, lambda n: 0.1 * max(1.0, n / 50), 60.0)
    assert 45 <= settled <= 200


def test_a_server_that_batches_is_not_held_back_for_its_latency() -> None:
    # Twice the requests take 1.3 times as long, up to the bound: throughput grows all the way.
    limit = AdaptiveLimit(256)
    settled = drive(limit, lambda n: 0.05 * (n / 8) ** 0.38, 60.0)
    assert settled > 200


def test_longer_prompts_do_not_cut_it_for_good() -> None:
    limit = AdaptiveLimit(32)
    drive(limit, lambda n: 0.05, 10.0)
    settled = drive(limit, lambda n: 0.2, 60.0, start=10.0)  # four times slower, whatever the limit
    assert settled > 28
