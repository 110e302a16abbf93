"""Requests a second."""

from __future__ import annotations

from leret.retrieval.ratelimit import RateLimit, shared_limit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_start_apart_and_a_late_waker_takes_no_ones_place() -> None:
    clock = Clock()
    limit = RateLimit(2.0, clock)
    assert limit.wait_s() == 0
    assert limit.wait_s() == 0.5
    clock.now = 100.7  # woke up late, and starts now
    assert limit.wait_s() == 0
    clock.now = 101.0
    assert round(limit.wait_s(), 6) == 0.2


def test_a_pause_holds_for_all() -> None:
    clock = Clock()
    limit = RateLimit(2.0, clock)
    limit.pause(3)
    assert limit.wait_s() == 3


def test_one_limit_a_server_and_the_lowest_rate_holds() -> None:
    a = shared_limit("test-host", 10.0)
    b = shared_limit("test-host", 3.0)
    assert a is b
    assert shared_limit("test-host", 10.0).per_s == 3.0
    assert shared_limit("another-host", 10.0) is not a
