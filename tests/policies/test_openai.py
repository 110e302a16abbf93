from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web

from leret.core.errors import PolicyError
from leret.policies.remote import dispatch
from leret.policies.remote.openai import OpenAIPolicy
from tests.policies.conftest import ask


class FakeServer:
    """Answers ``text <seed>``; honours ``n`` or not; goes through ``faults`` first."""

    def __init__(
        self, takes_n: bool = True, faults: list[Any] | None = None, *, most_n: int = 100, strict: bool = False
    ) -> None:
        self.takes_n = takes_n
        self.most_n = most_n
        self.strict = strict
        self.times: list[float] = []
        self.faults = faults or []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.times.append(time.monotonic())
        if self.faults:
            fault = self.faults.pop(0)
            if fault == "reset":
                assert request.transport is not None
                request.transport.abort()
            if fault == "hang":
                await asyncio.sleep(5)
            if isinstance(fault, web.Response):
                return web.Response(status=fault.status, headers=fault.headers, body=fault.body)
        n = body.get("n", 1) if self.takes_n else 1
        if n > self.most_n or (self.strict and "return_token_ids" in body):
            return web.json_response({"error": {"message": "unknown or too much"}}, status=400)
        choices = [
            {"index": i, "message": {"content": f"text {body['seed']}.{i}"}, "finish_reason": "stop"} for i in range(n)
        ]
        return web.json_response({"choices": choices, "usage": {"prompt_tokens": 5, "completion_tokens": 2 * n}})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})


@asynccontextmanager
async def serving(*servers: FakeServer) -> AsyncIterator[list[str]]:
    runners = []
    for server in servers:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.chat)
        app.router.add_get("/v1/models", server.models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        runners.append(runner)
    yield [server.url for server in servers]
    for runner in runners:
        await runner.cleanup()


def run(servers: list[FakeServer], work: Callable[[OpenAIPolicy], Awaitable[Any]], **kwargs: Any) -> Any:
    async def main() -> Any:
        async with serving(*servers) as urls:
            policy = OpenAIPolicy("tiny", urls, **kwargs)
            try:
                return await work(policy)
            finally:
                await policy.aclose()
                await policy.aclose()

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.01)


def test_several_samples_are_one_request_where_the_server_was_seen_to_make_them() -> None:
    server = FakeServer()
    own = run([server], lambda policy: policy.complete(ask("the city", 1, 2, 3, stop=("\n",))))
    assert len({completion.text for completion in own}) == 3
    probe, asked = server.bodies
    assert (probe["n"], probe["max_tokens"]) == (2, 1)
    assert (asked["n"], asked["max_tokens"], asked["stop"], asked["model"]) == (3, 8, ["\n"], "tiny")
    assert "Authorization" not in server.headers[0]


def test_where_n_is_ignored_each_sample_is_a_request_with_its_own_seed() -> None:
    server = FakeServer(takes_n=False)
    own = run([server], lambda policy: policy.complete(ask("the city", 1, 2, 3)))
    assert len({completion.text for completion in own}) == 3
    assert len({body["seed"] for body in server.bodies[1:]}) == 3
    assert all("n" not in body for body in server.bodies[1:])


def test_a_server_that_refuses_n_gets_single_requests() -> None:
    server = FakeServer(takes_n=False, faults=[web.json_response({"message": "n must be 1"}, status=400)])
    assert len(run([server], lambda policy: policy.complete(ask("the city", 1, 2)))) == 2


def test_one_seed_needs_no_probe_and_greedy_asks_once() -> None:
    server = FakeServer()
    own = run([server], lambda policy: policy.complete(ask("the city", 1, 2, temperature=0.0)))
    assert len(server.bodies) == 1
    assert own[0] == own[1]


@pytest.mark.parametrize(
    "fault",
    [
        web.Response(status=503),
        web.Response(status=429, headers={"Retry-After": "0.01"}),
        web.Response(text="{not json"),
        web.json_response({"choices": []}),
        "reset",
        "hang",
    ],
    ids=["503", "429", "broken json", "no choices", "reset", "hang"],
)
def test_a_passing_failure_is_tried_again(fault: Any) -> None:
    server = FakeServer(faults=[fault])
    own = run([server], lambda policy: policy.complete(ask("the city", 1)), timeout_s=2.0 if fault == "hang" else 60.0)
    assert len(own) == 1
    assert len(server.bodies) == 2


def test_a_refusal_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sk-secret")
    server = FakeServer(faults=[web.json_response({"error": {"message": "no model tiny"}}, status=404)])
    policies = []

    async def work(policy: OpenAIPolicy) -> Any:
        policies.append(policy)
        return await policy.complete(ask("the city", 1))

    with pytest.raises(PolicyError, match="404: no model tiny") as caught:
        run([server], work, api_key_env="TINY_KEY")
    assert len(server.bodies) == 1
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in f"{caught.value!r} {policies[0]!r} {caught.value.__cause__!r}"


def test_a_lasting_failure_is_told_with_the_attempts() -> None:
    server = FakeServer(faults=[web.Response(status=500, text="boom")] * 3)
    with pytest.raises(PolicyError, match=r"500: boom; gave up after 3 attempts"):
        run([server], lambda policy: policy.complete(ask("the city", 1)), max_retries=2)


def test_a_server_that_fails_leaves_the_rotation() -> None:
    bad, good = FakeServer(faults=[web.Response(status=500)] * 100), FakeServer()

    async def work(policy: OpenAIPolicy) -> Any:
        return [await policy.complete(ask("the city", i)) for i in range(10)]

    assert len(run([bad, good], work)) == 10
    assert len(bad.bodies) <= 2
    assert len(good.bodies) == 10


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    server = FakeServer()
    most = [0, 0]
    answer = server.chat

    async def counted(request: web.Request) -> web.StreamResponse:
        most[0] += 1
        most[1] = max(most)
        await asyncio.sleep(0.005)
        most[0] -= 1
        return await answer(request)

    server.chat = counted  # type: ignore[method-assign]

    async def work(policy: OpenAIPolicy) -> Any:
        return await asyncio.gather(*[policy.complete(ask("the city", i)) for i in range(20)])

    assert len(run([server], work, concurrency=4)) == 20
    assert most[1] <= 4


def test_the_served_models_are_listed() -> None:
    assert run([FakeServer()], lambda policy: policy.served_models()) == ["tiny"]


def test_the_digest_names_the_model_and_not_the_address() -> None:
    one, other = OpenAIPolicy("tiny", ["http://a/v1"]), OpenAIPolicy("tiny", ["http://b/v1"])
    assert one.digest == other.digest
    assert one.digest != OpenAIPolicy("small", ["http://a/v1"]).digest


def test_a_missing_key_and_missing_urls_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINY_KEY", raising=False)
    with pytest.raises(PolicyError, match="TINY_KEY"):
        OpenAIPolicy("tiny", ["http://a/v1"], api_key_env="TINY_KEY")
    with pytest.raises(PolicyError, match=r"policy\.urls is empty"):
        OpenAIPolicy("tiny", [])


def test_requests_ask_for_logprobs_and_token_ids_only_when_told() -> None:
    server = FakeServer()
    run([server], lambda policy: policy.complete(ask("the city", 1)), logprobs=True)
    run([server], lambda policy: policy.complete(ask("the city", 1)))
    assert [body.get("logprobs") for body in server.bodies] == [True, None]
    assert [body.get("return_token_ids") for body in server.bodies] == [True, None]
    assert json.dumps(server.bodies[1])


def test_a_retry_after_that_is_a_date_is_waited_for() -> None:
    moment = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    server = FakeServer(faults=[web.Response(status=429, headers={"Retry-After": moment})])
    began = time.monotonic()
    run([server], lambda policy: policy.complete(ask("the city", 1)))
    assert time.monotonic() - began >= 0.9  # a date has no fractions of a second


def test_nothing_is_sent_to_a_server_before_the_moment_it_named() -> None:
    server = FakeServer(faults=[web.Response(status=503, headers={"Retry-After": "0.3"})])

    async def work(policy: OpenAIPolicy) -> Any:
        first = asyncio.create_task(policy.complete(ask("the city", 1)))
        while policy.meter.snapshot().get("fault_overloaded", 0) == 0:
            await asyncio.sleep(0.005)
        await policy.complete(ask("the city", 2))
        await first

    run([server], work)
    assert server.times[1] - server.times[0] >= 0.3


def test_a_request_has_a_deadline_over_all_its_attempts() -> None:
    server = FakeServer(faults=["hang"] * 50)
    began = time.monotonic()
    with pytest.raises(PolicyError, match=r"did not answer within .*gave up after \d attempt") as caught:
        run([server], lambda policy: policy.complete(ask("the city", 1)), timeout_s=0.3, deadline_s=0.8)
    assert time.monotonic() - began < 4
    assert caught.value.exit_code == 1


def test_a_retry_after_beyond_the_deadline_is_not_waited_for() -> None:
    server = FakeServer(faults=[web.Response(status=429, headers={"Retry-After": "100"})])
    began = time.monotonic()
    with pytest.raises(PolicyError, match="429"):
        run([server], lambda policy: policy.complete(ask("the city", 1)), deadline_s=0.5)
    assert time.monotonic() - began < 4


def test_tokens_are_counted_once_a_prompt_and_shared_out_among_its_completions() -> None:
    server = FakeServer()

    async def work(policy: OpenAIPolicy) -> Any:
        own = await policy.complete(ask("the city", 1, 2, 3))
        return own, policy.meter.snapshot()

    own, told = run([server], work, price_prompt=1.0, price_completion=10.0)
    assert sum(completion.n_completion_tokens for completion in own) == 6
    assert (told["prompt_tokens"], told["completion_tokens"], told["completions"]) == (5, 6, 3)
    assert told["cost"] == pytest.approx((5 * 1.0 + 6 * 10.0) / 1e6)
    assert told["calls"] == 2  # with the probe
    assert 0 < told["latency_p50_s"] <= told["latency_p99_s"] < 5


def test_a_server_that_refuses_so_many_choices_gets_single_requests_from_then_on() -> None:
    server = FakeServer(most_n=2)

    async def work(policy: OpenAIPolicy) -> Any:
        return [await policy.complete(ask("the city", *range(i, i + 3))) for i in (0, 10)]

    first, second = run([server], work)
    assert len(first) == len(second) == 3
    assert [body.get("n", 1) for body in server.bodies] == [2, 3, 1, 1, 1, 1, 1, 1]


def test_an_extension_that_a_strict_server_refuses_is_left_out() -> None:
    server = FakeServer(strict=True)

    async def work(policy: OpenAIPolicy) -> Any:
        return [await policy.complete(ask("the city", i)) for i in (0, 1)]

    run([server], work, logprobs=True)
    assert ["return_token_ids" in body for body in server.bodies] == [True, False, False]
    assert all(body["logprobs"] for body in server.bodies)


def test_many_prompts_at_once_are_probed_once() -> None:
    server = FakeServer()

    async def work(policy: OpenAIPolicy) -> Any:
        return await asyncio.gather(*[policy.complete(ask(f"city {i}", 1, 2)) for i in range(10)])

    run([server], work)
    assert [body["max_tokens"] for body in server.bodies].count(1) == 1


def test_a_server_that_says_429_gets_fewer_requests_at_a_time() -> None:
    server = FakeServer(faults=[web.Response(status=429)] * 8)

    async def work(policy: OpenAIPolicy) -> Any:
        before = policy.meter.snapshot()["concurrency"]
        await asyncio.gather(*[policy.complete(ask("the city", i)) for i in range(16)])
        return before, policy.meter.snapshot()

    before, told = run([server], work, concurrency=16)
    assert before == 0  # no event loop has asked yet
    assert told["concurrency"] < 16
    assert (told["fault_rate_limit"], told["retries"], told["calls"], told["in_flight"]) == (8, 8, 16, 0)


def test_a_redirect_is_refused_so_that_the_key_goes_nowhere_else() -> None:
    elsewhere = web.Response(status=307, headers={"Location": "http://127.0.0.1:9/v1"})
    with pytest.raises(PolicyError, match="307"):
        run([FakeServer(faults=[elsewhere])], lambda policy: policy.complete(ask("the city", 1)))


def test_a_task_that_is_cancelled_leaves_its_place_to_others() -> None:
    server = FakeServer(faults=["hang"])

    async def work(policy: OpenAIPolicy) -> Any:
        stuck = asyncio.create_task(policy.complete(ask("the city", 1)))
        while not server.bodies:
            await asyncio.sleep(0.005)
        stuck.cancel()
        return await asyncio.wait_for(policy.complete(ask("the city", 2)), 10)

    assert len(run([server], work, concurrency=1)) == 1
