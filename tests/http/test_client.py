import asyncio
import json
import logging
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web

from leret.http.client import Answer, Call, Client, RejectedError, RetryableError, retry_after_s
from leret.http.endpoints import ApiKey, RateLimit
from leret.http.usage import FaultMeter
from tests.http.servers import Served, serving

SECRET = "sk-0123456789abcdef"
ADVICE = {True: "correct the key", False: "correct the URL"}
POST = Call("POST", "/x", json={"a": "é\ud800"})


class Echo(Served):
    n_now = most_at_once = 0

    async def route(self, request, body):
        self.n_now += 1
        self.most_at_once = max(self.most_at_once, self.n_now)
        await asyncio.sleep(0.01)
        self.n_now -= 1
        return web.json_response({"got": body})


class Time:
    def __init__(self):
        self.slept = []

    def clock(self):
        return sum(self.slept)

    async def sleep(self, seconds):
        self.slept.append(seconds)
        await asyncio.sleep(0)


def got(answer):
    return answer.json["got"]


def asked(client):
    return client.request(POST, got)


def several(n):
    async def work(client):
        return await asyncio.gather(*[asked(client) for _ in range(n)], return_exceptions=True)

    return work


def run(servers, work=asked, time=None, **kwargs):
    time = time or Time()

    async def main():
        async with serving(*servers) as urls:
            client = Client(urls, setting="policy", clock=time.clock, sleep=time.sleep, **kwargs)
            try:
                return await work(client)
            finally:
                await client.aclose()
                await client.aclose()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (web.Response(status=429, headers={"Retry-After": "3"}), "rate_limit"),
        (web.Response(status=500), "server"),
        (web.Response(status=503), "overloaded"),
        (web.json_response({"other": 1}), "malformed"),
        ("reset", "connection"),
        ("stall", "timeout"),
    ],
    ids=["429", "500", "503", "shape", "reset", "stall"],
)
def test_temporary_failure_is_retried_counted_and_logged(fault, kind, caplog):
    caplog.set_level(logging.INFO, "leret")
    meter, time = FaultMeter(), Time()
    assert run([Echo([fault])], time=time, meter=meter, timeout_s=0.3 if fault == "stall" else 60.0)
    assert {"retries": 1, f"fault_{kind}": 1}.items() <= meter.snapshot().items()
    assert [wait_s >= 3 for wait_s in time.slept] == [kind == "rate_limit"]
    assert [record.levelname for record in caplog.records if "attempt 2 in" in record.message] == ["INFO"]


def test_the_wait_doubles_up_to_ten_seconds_and_ends_in_time():
    time = Time()
    with pytest.raises(RetryableError, match=r"503.* gave up after \d+ attempts; check that the server") as caught:
        run([Echo([web.Response(status=503)] * 99)], time=time, retry_for_s=60.0)
    assert 40 < time.clock() <= 60
    assert all(0.1 * 2**n <= wait <= 0.3 * 2**n for n, wait in enumerate(time.slept[:5]))
    assert max(time.slept) <= 15
    assert caught.value.exit_code == 1


def test_outage_is_waited_for_once_by_all_requests():
    time = Time()
    failed = run([Echo([web.Response(status=503)] * 9999)], several(40), time, concurrency=2, retry_for_s=30.0)
    assert all(isinstance(failure, RetryableError) for failure in failed)
    assert time.clock() < 40 * 30 / 4


@pytest.mark.parametrize(
    ("status", "text", "n_requests", "says"),
    [
        (200, "<html>", 3, "gave up after 3 attempts"),
        (500, "Conversation roles must alternate user/assistant", 1, "answered 500: Conversation roles"),
        (501, "no such method", 1, "answered 501: no such method"),
    ],
)
def test_a_fault_that_stays_ends_a_request(status, text, n_requests, says):
    server = Echo([web.Response(status=status, text=text)] * 99)
    with pytest.raises((RetryableError, RejectedError), match=says):
        run([server], retry_for_s=600.0)
    assert len(server.requests) == n_requests


def test_requests_in_flight_and_their_rate_are_limited():
    server, time = Echo(), Time()
    run([server], several(9), time, concurrency=3, rate=RateLimit(2.0, time.clock))
    assert (len(server.requests), server.most_at_once <= 3, time.clock() >= 4.0) == (9, True, True)


def test_a_server_that_is_slow_under_load_gets_fewer_requests(caplog):
    server = Echo(["stall"] * 8)
    run([server], several(8), concurrency=8, timeout_s=0.5)
    assert (len(server.requests), server.most_at_once <= 4) == (16, True)
    [note] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "needs more than policy.timeout_s (0.5 s)" in note


@pytest.mark.parametrize("status", [200, 401, 500])
def test_repeated_secret_is_in_no_message(status, caplog):
    caplog.set_level(logging.DEBUG)
    told = web.json_response({"message": f"bad key: {SECRET}", "pad": "x" * 250 + SECRET}, status=status)
    with pytest.raises((RetryableError, RejectedError), match=r"bad key: \[key\]") as caught:
        run([Echo([told] * 99)], key=ApiKey(SECRET), retry_for_s=9.0)
    cause = caught.value
    while cause is not None:
        assert SECRET[:8] not in repr(cause) + repr(vars(cause))
        cause = cause.__cause__ or cause.__context__
    assert SECRET[:8] not in caplog.text


def answer(status, body="busy"):
    return Answer("http://a/v1", status, {"Retry-After": "3"}, body.encode())


@pytest.mark.parametrize("status", [302, 401, 403, 422])
def test_other_status_is_a_rejection_with_its_message(status):
    advice = "key" if status in {401, 403} else "URL"
    with pytest.raises(RejectedError, match=f"{status}: no such model; correct the {advice}") as caught:
        answer(status, json.dumps({"error": {"message": "no such model"}})).check(ADVICE)
    assert (caught.value.status, caught.value.exit_code) == (status, 2)


@pytest.mark.parametrize("body", ["<html>", "[" * 200_000, '{"a'])
def test_invalid_json_is_malformed_and_cut(body):
    with pytest.raises(RetryableError, match="http://a/v1 sent invalid JSON") as caught:
        _ = answer(200, body).json
    assert caught.value.kind == "malformed"
    with pytest.raises(RejectedError, match=r"\A.{,399}\Z"):
        answer(400, body).check(ADVICE)


def test_retry_after_is_read_as_seconds_or_as_a_date():
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert retry_after_s({"Retry-After": date}) == pytest.approx(30, abs=3)
    unreadable = dict.fromkeys(["nan", "soon", "Wed, 21 Oct 2015 07:28:00 +99999999999999999999"])
    for value, seconds in {"1000000": 120, "-5": 0, **unreadable}.items():
        assert retry_after_s({"Retry-After": value}) == seconds
