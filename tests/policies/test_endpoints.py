from __future__ import annotations

from leret.policies.endpoints import Endpoints


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_least_busy_endpoint_gets_the_next_request() -> None:
    endpoints = Endpoints(["http://a/v1/", "http://b/v1"])
    taken = [endpoints.take().url for _ in range(4)]
    assert taken == ["http://a/v1", "http://b/v1", "http://a/v1", "http://b/v1"]


def test_an_endpoint_that_fails_rests_twice_as_long_each_time_and_comes_back() -> None:
    clock = Clock()
    endpoints = Endpoints(["http://a/v1", "http://b/v1"], clock)
    first = endpoints.take()
    endpoints.give_back(first, ok=False)  # rests until 1.0
    assert [endpoints.take().url for _ in range(2)] == ["http://b/v1", "http://b/v1"]
    clock.now = 1.0
    again = endpoints.take()
    assert again is first
    endpoints.give_back(again, ok=False)  # rests 2 s, until 3.0
    clock.now = 2.9
    assert endpoints.take().url == "http://b/v1"
    clock.now = 3.0
    assert endpoints.take() is first


def test_where_all_rest_the_one_back_first_is_asked() -> None:
    clock = Clock()
    endpoints = Endpoints(["http://a/v1", "http://b/v1"], clock)
    a, b = endpoints.take(), endpoints.take()
    endpoints.give_back(b, ok=False)
    clock.now = 0.5
    endpoints.give_back(a, ok=False)
    assert endpoints.take() is b
