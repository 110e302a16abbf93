from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from leret.policies.remote.endpoints import Endpoint, Endpoints


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def two(clock: Clock) -> Endpoints:
    return Endpoints(["http://a/v1", "http://b/v1"], clock=clock)


def take(endpoints: Endpoints) -> Endpoint:
    endpoint = endpoints.take()
    assert endpoint is not None
    return endpoint


def fail(endpoints: Endpoints, endpoint: Endpoint, kind: str = "connection", wait_s: float | None = None) -> None:
    endpoints.failed(endpoint, endpoints.clock(), kind, wait_s, blame=kind != "rate_limit")


def test_the_least_busy_endpoint_gets_the_next_request(two: Endpoints) -> None:
    assert [take(two).url for _ in range(4)] == ["http://a/v1", "http://b/v1", "http://a/v1", "http://b/v1"]


def test_an_endpoint_that_fails_rests_twice_as_long_each_time_and_comes_back(two: Endpoints, clock: Clock) -> None:
    first = take(two)
    fail(two, first)  # rests until 1.0
    assert [take(two).url for _ in range(2)] == ["http://b/v1", "http://b/v1"]
    clock.now = 1.0
    again = take(two)
    assert again is first
    fail(two, again)  # rests 2 s, until 3.0
    clock.now = 2.9
    assert take(two).url == "http://b/v1"
    clock.now = 3.0
    assert take(two) is first


def test_an_endpoint_that_comes_back_gets_one_request_until_that_succeeds(two: Endpoints, clock: Clock) -> None:
    first = take(two)
    fail(two, first)
    clock.now = 1.0
    assert [take(two).url for _ in range(3)] == ["http://a/v1", "http://b/v1", "http://b/v1"]
    two.answered(first, 1.0)
    assert take(two) is first


def test_requests_that_were_under_way_together_are_one_failure(two: Endpoints, clock: Clock) -> None:
    under_way = [take(two) for _ in range(8)]
    clock.now = 5.0
    for endpoint in under_way:
        two.failed(endpoint, 0.0, "connection", None, blame=True)
    assert [endpoint.resting_until for endpoint in two.all] == [6.0, 6.0]


def test_where_all_rest_the_one_back_first_is_asked(two: Endpoints, clock: Clock) -> None:
    a, b = take(two), take(two)
    fail(two, b)
    clock.now = 0.5
    fail(two, a)
    assert take(two) is b


def test_retry_after_closes_an_endpoint_even_where_it_is_the_only_one(clock: Clock) -> None:
    alone = Endpoints(["http://a/v1"], clock=clock)
    fail(alone, take(alone), "rate_limit", wait_s=10.0)
    clock.now = 9.9
    assert alone.take() is None
    clock.now = 11.0  # ten seconds and a tenth at most
    assert alone.take() is not None


def test_overload_cuts_what_is_in_flight_and_success_lets_it_grow(clock: Clock) -> None:
    alone = Endpoints(["http://a/v1"], 64, clock=clock)
    taken = [take(alone) for _ in range(32)]
    assert alone.take() is None
    clock.now = 1.0
    alone.failed(taken[0], 0.5, "rate_limit", None, blame=False)
    assert int(alone.all[0].limit.value) == 22  # 32 x 0.7
    for endpoint in taken[1:]:
        alone.answered(endpoint, 0.5)
    assert len([endpoint for endpoint in (alone.take() for _ in range(40)) if endpoint is not None]) < 32


def run(work: Callable[[Endpoints], object], most: int = 1) -> None:
    async def main() -> None:
        await work(Endpoints(["http://a/v1"], most))  # type: ignore[misc]

    asyncio.run(main())


def test_who_waits_is_served_in_order_and_nobody_overtakes() -> None:
    async def work(endpoints: Endpoints) -> None:
        first = take(endpoints)
        order: list[int] = []

        async def wait(index: int) -> None:
            order.append(index) if await endpoints.wait() else None

        tasks = [asyncio.create_task(wait(index)) for index in range(3)]
        await asyncio.sleep(0)
        assert endpoints.take() is None
        for _ in range(3):
            endpoints.release(first)
            await asyncio.sleep(0.001)
        assert order == [0, 1, 2]
        await asyncio.gather(*tasks)

    run(work)


def test_a_place_is_not_lost_with_a_task_that_was_cancelled_as_it_got_it() -> None:
    async def work(endpoints: Endpoints) -> None:
        first = take(endpoints)
        waiting = [asyncio.create_task(endpoints.wait()) for _ in range(2)]
        await asyncio.sleep(0)
        endpoints.release(first)  # the place is the first one's now
        waiting[0].cancel()
        assert (await waiting[1]).url == "http://a/v1"
        assert endpoints.n_in_flight == 1

    run(work)


def test_who_waits_for_a_closed_endpoint_is_woken_when_it_opens() -> None:
    async def work(endpoints: Endpoints) -> None:
        fail(endpoints, take(endpoints), "rate_limit", wait_s=0.02)
        began = endpoints.clock()
        await asyncio.wait_for(endpoints.wait(), 5)
        assert endpoints.clock() - began >= 0.02

    run(work)
