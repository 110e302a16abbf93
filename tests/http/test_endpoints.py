import asyncio
import pickle

import pytest

from leret.core.errors import ConfigError
from leret.http.endpoints import ApiKey, EndpointPool, Listening, Slots, checked_urls

SECRET = "sk-0123456789abcdef"


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pool(clock):
    return EndpointPool(["http://a", "http://b"], clock)


def test_the_least_busy_server_is_next(pool):
    one, other, _ = (pool.take() for _ in range(3))
    assert {one.url, other.url} == {"http://a", "http://b"}
    other.n_in_flight -= 1
    assert pool.take() is other


def test_failing_server_pauses_longer_each_time(pool, clock):
    bad, good = pool.all
    bad.n_in_flight = 1
    for rest_s in (0.5, 1.0, 2.0):
        pool.failed(bad, clock.now, "server", None)
        bad.n_in_flight -= 1
        assert bad.paused_until == clock.now + rest_s
        assert {pool.take(), pool.take()} == {good}
        clock.now = bad.paused_until
        assert [pool.take(), pool.take()] == [bad, good]  # one request shows whether it is well again


def test_an_outage_counts_as_one_failure_and_other_faults_as_none(pool, clock):
    began = clock.now
    for kind in ("rate_limit", "incomplete"):
        pool.failed(pool.all[0], began, kind, None)
    assert pool.all[0].n_failures == 0
    clock.now += 1
    for _ in range(32):
        pool.failed(pool.all[0], began, "server", None)
    assert pool.all[0].n_failures == 1


def test_invalid_url_is_refused():
    for url in ("host:80", "ftp://x", "http://", "http://h:x", "http://h:99999", "", "http://h/?a=b"):
        with pytest.raises(ConfigError, match=r"retriever\.urls: .* is not a base URL"):
            checked_urls([url], "retriever.urls")


def test_key_is_only_in_its_header_and_redacted_in_texts(monkeypatch):
    monkeypatch.setenv("TINY_KEY", f"{SECRET}\n")
    key = ApiKey.from_env("TINY_KEY", "policy.api_key_env")
    assert key.headers() == {"Authorization": f"Bearer {SECRET}"}
    assert ApiKey("Basic abc").headers() == {"Authorization": "Basic abc"}
    assert SECRET not in f"{key} {key!r}"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(key)
    assert ApiKey(SECRET).redact(f"you sent {SECRET}; and {SECRET[:9]}...") == "you sent [key]; and [key]..."
    assert ApiKey("Basic s3cret").redact("who is s3cret?") == "who is [key]?"


@pytest.mark.parametrize("value", ["", " ", "sk-first\nsk-second", "sk-é"])
def test_variable_without_key_is_refused_without_value(value, monkeypatch):
    monkeypatch.setenv("TINY_KEY", value)
    with pytest.raises(ConfigError, match=r"policy\.api_key_env: .*TINY_KEY") as caught:
        ApiKey.from_env("TINY_KEY", "policy.api_key_env")
    assert "sk-" not in str(caught.value)


def test_time_outs_halve_the_requests_in_flight_and_answers_raise_them(clock):
    async def main():
        slots = Slots(8, clock=clock)
        for _ in range(6):
            await slots.acquire()
        clock.now += 60.0
        for _ in range(6):  # all of a wave time out together
            await slots.timed_out(sent=100.0)
            slots.release()
        assert slots.limit == 3
        waiting = [asyncio.ensure_future(slots.acquire()) for _ in range(8)]
        for n_answered, limit in ((0, 3), (12, 4)):
            for _ in range(n_answered):
                slots.answered()
            await asyncio.sleep(0)
            assert (slots.limit, sum(waiter.done() for waiter in waiting)) == (limit, limit)
        for _ in range(3):
            clock.now += 60.0
            await slots.timed_out(sent=clock.now)
        assert slots.limit == 1

    asyncio.run(main())


def test_the_url_is_for_clients_of_this_machine():
    for host, url in {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]", "node7": "node7"}.items():
        assert Listening(host, 80).url == f"http://{url}:80"
