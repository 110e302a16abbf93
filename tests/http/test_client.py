"""The client against servers on loopback; its waits are on a clock of the test's."""

from __future__ import annotations

import asyncio
import gc
import gzip
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

import leret.http.answers
from leret.core.aio import submit
from leret.core.usage import UsageMeter
from leret.http.answers import Answer, ApiKey, RejectedError, RetryableError
from leret.http.client import Call, Client
from leret.http.endpoints import RateLimit
from tests.http.servers import Served, serving

SECRET = "sk-0123456789abcdef"
POST = Call.post("/x", {"a": "é\ud800"})


class Echo(Served):
    """Answers with what it was sent."""

    async def answer(self, body: Any) -> web.Response:
        return web.json_response({"got": body})


class Time:
    """A clock that goes on as far as anybody sleeps, at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def run(
    servers: list[Served], work: Callable[[Client], Awaitable[Any]], time: Time | None = None, **kwargs: Any
) -> Any:
    async def main() -> Any:
        own = time or Time()
        async with serving(*servers) as urls:
            client = Client(urls, setting="policy", clock=own.clock, sleep=own.sleep, **kwargs)
            try:
                return await work(client)
            finally:
                await client.aclose()
                await client.aclose()

    return asyncio.run(main())


def got(answer: Answer) -> Any:
    return answer.json["got"]


def asked(client: Client) -> Awaitable[Any]:
    return client.request(POST, got)


def test_a_request_carries_json_parameters_and_forms() -> None:
    server = Echo()

    async def work(client: Client) -> Any:
        assert await client.request(POST, got) == {"a": "é\ud800"}
        await client.request(Call("GET", "/x", {"q": "a&k=9 é\ud800"}), got)
        await client.request(Call.form("/x", {"q": "a&k=9"}), got)

    run([server], work)
    post, get, form = server.requests
    assert post.headers["Content-Type"] == "application/json"
    assert get.query == {"q": "a&k=9 é?"}
    assert form.headers["Content-Type"] == "application/x-www-form-urlencoded"
    assert "Authorization" not in post.headers


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (web.Response(status=429, headers={"Retry-After": "3"}), "rate_limit"),
        (web.Response(status=503), "overloaded"),
        (web.Response(status=500), "server"),
        (web.Response(text="{not json"), "malformed"),
        (web.json_response({"other": 1}), "malformed"),
        ("reset", "connection"),
        ("stall", "timeout"),
    ],
    ids=["429", "503", "500", "json", "shape", "reset", "stall"],
)
def test_a_passing_failure_is_tried_again_counted_and_logged(
    fault: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leret")
    server, meter, time = Echo([fault]), UsageMeter(), Time()
    assert run([server], asked, time, meter=meter, timeout_s=0.3 if fault == "stall" else 60.0)
    told = meter.snapshot()
    assert (told["calls"], told["retries"], told[f"fault_{kind}"]) == (1, 1, 1)
    assert len(time.slept) == 1
    assert (time.slept[0] >= 3) == (kind == "rate_limit")
    assert [record.levelname for record in caplog.records if "attempt 2 in" in record.message] == ["INFO"]


def test_the_wait_doubles_up_to_ten_seconds_and_ends_in_time() -> None:
    time = Time()
    with pytest.raises(RetryableError, match=r"503.* gave up after \d+ attempts; see that the server is up") as caught:
        run([Echo([web.Response(status=503)] * 99)], asked, time, retry_for_s=60.0)
    assert 40 < time.now <= 60
    assert all(0.1 * 2**n <= wait <= 0.3 * 2**n for n, wait in enumerate(time.slept[:5]))
    assert max(time.slept) <= 15
    assert caught.value.exit_code == 1


def test_an_outage_is_waited_for_once_and_not_by_each_request_anew() -> None:
    time = Time()

    async def work(client: Client) -> list[Any]:
        return await asyncio.gather(*[asked(client) for _ in range(40)], return_exceptions=True)

    failed = run([Echo([web.Response(status=503)] * 9999)], work, time, concurrency=2, retry_for_s=30.0)
    assert all(isinstance(failure, RetryableError) for failure in failed)
    assert time.now < 40 * 30 / 4


def test_what_makes_no_sense_three_times_is_not_waited_for() -> None:
    server = Echo([web.Response(text="<html>")] * 9)
    with pytest.raises(RetryableError, match="gave up after 3 attempts"):
        run([server], asked, retry_for_s=600.0)
    assert len(server.requests) == 3


def test_a_rejection_is_final_and_leaves_the_server_in_rotation() -> None:
    server, meter = Echo([web.json_response({"error": {"message": "no model"}}, status=404)]), UsageMeter()

    async def work(client: Client) -> Any:
        with pytest.raises(RejectedError, match=r"404: no model; correct policy\.urls"):
            await asked(client)
        return await asked(client)

    assert run([server], work, meter=meter)
    assert meter.snapshot()["fault_rejected"] == 1


def test_of_two_servers_the_good_one_takes_over() -> None:
    bad, good = Echo([web.Response(status=500)] * 99), Echo()

    async def work(client: Client) -> None:
        for _ in range(20):
            await asked(client)

    run([bad, good], work)
    assert len(bad.requests) <= 4
    assert len(good.requests) == 20


def test_requests_in_flight_and_their_rate_are_limited() -> None:
    server, time = Echo(), Time()

    async def work(client: Client) -> None:
        await asyncio.gather(*[asked(client) for _ in range(9)])

    run([server], work, time, concurrency=3, rate=RateLimit(2.0, time.clock))
    assert server.most_at_once <= 3
    assert len(server.requests) == 9
    assert time.now >= 4.0


@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_key_that_a_server_repeats_is_in_no_message(status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told = web.json_response({"message": f"bad key: {SECRET}", "pad": "x" * 250 + SECRET}, status=status)
    server = Echo([told] * 99)
    with pytest.raises((RetryableError, RejectedError), match=r"bad key: \[key\]") as caught:
        run([server], asked, key=ApiKey(SECRET), secret=ApiKey("other"), retry_for_s=9.0)
    assert server.requests[0].headers["Authorization"] == f"Bearer {SECRET}"
    cause: BaseException | None = caught.value
    while cause is not None:
        assert SECRET[:8] not in repr(cause) + repr(vars(cause))
        cause = cause.__cause__ or cause.__context__
    assert SECRET[:8] not in caplog.text


@pytest.mark.parametrize("status", [200, 500])
def test_a_bomb_is_not_inflated_beyond_the_bound(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leret.http.answers, "MAX_BYTES", 2**20)
    bomb = gzip.compress(bytes(50 * 2**20), 1)
    server = Echo([web.Response(status=status, body=bomb, headers={"Content-Encoding": "gzip"})])
    with pytest.raises(RejectedError, match="more than 1048576 bytes") as caught:
        run([server], asked)
    assert caught.value.exit_code == 1


def test_a_server_that_is_not_there_is_away_and_not_late() -> None:
    async def main(url: str) -> None:
        client = Client([url], setting="policy", retry_for_s=0)
        with pytest.raises(RetryableError, match=r"/x cannot be reached .*gave up after 1 attempt;") as caught:
            await asked(client)
        assert caught.value.kind == "connection"
        await client.aclose()

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        asyncio.run(main(f"http://127.0.0.1:{unused.getsockname()[1]}"))


def test_an_interrupt_ends_a_request_at_once_and_frees_its_slot() -> None:
    async def work(client: Client) -> Any:
        task = asyncio.create_task(asked(client))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asked(client)

    assert run([Echo(["stall"])], work, concurrency=1)


def test_a_client_serves_several_loops_and_leaves_no_connection_open(caplog: pytest.LogCaptureFixture) -> None:
    async def twice(urls: list[str]) -> None:
        client = Client(urls, setting="policy")
        assert await asked(client)
        assert await asyncio.wrap_future(submit(client.request(POST, got)))
        await client.aclose()
        assert await asyncio.wrap_future(submit(client.request(POST, got)))

    async def main() -> None:
        async with serving(Echo()) as urls:
            await twice(urls)
            await asyncio.to_thread(gc.collect)

    asyncio.run(main())
    assert "Unclosed" not in caplog.text
