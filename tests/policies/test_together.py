"""The Together policy with the real SDK against a loopback server that speaks Together's protocol."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import leret.http.messages
import pytest
from aiohttp import web
from leret.policies.remote.chat import server_seed

from leret.core.errors import PolicyError
from leret.policies.remote import dispatch
from tests.policies.conftest import ask
from tests.policies.servers import TogetherServer, completion, serving

pytest.importorskip("together", reason="pip install 'leret[together]'")

from leret.policies.remote.together import TogetherPolicy

SECRET = "tgp_v1_this_is_the_secret"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.01)
    monkeypatch.setenv("TOGETHER_API_KEY", SECRET)


def run(servers: list[TogetherServer], work: Callable[[TogetherPolicy], Awaitable[Any]], **kwargs: Any) -> Any:
    async def main() -> Any:
        async with serving(*servers, under="/v1") as urls:
            policy = TogetherPolicy("small", urls, **kwargs)
            try:
                return await work(policy)
            finally:
                await policy.aclose()
                await policy.aclose()

    return asyncio.run(main())


def test_a_sample_comes_back_through_the_sdk_with_tokens_and_log_probabilities() -> None:
    server = TogetherServer()
    [own] = run([server], lambda policy: policy.complete(ask("the city", 1, stop=("\n",))), logprobs=True)
    assert own.text == f"text {server_seed(1)}.0"
    assert (own.token_ids, own.logprobs) == ((5, 6), (-0.5, -1.0))
    assert (own.n_prompt_tokens, own.n_completion_tokens) == (5, 2)
    [body] = server.bodies
    assert (body["model"], body["stop"], body["logprobs"], body["max_tokens"]) == ("small", ["\n"], 1, 8)
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"


def test_several_samples_are_one_request_after_a_probe() -> None:
    server = TogetherServer()
    own = run([server], lambda policy: policy.complete(ask("the city", 1, 2, 3)))
    assert len({completion.text for completion in own}) == 3
    assert [body.get("n") for body in server.bodies] == [2, 3]


def test_many_prompts_at_once_are_probed_once_and_their_prompts_are_billed_once() -> None:
    server = TogetherServer()

    async def work(policy: TogetherPolicy) -> Any:
        await asyncio.gather(*[policy.complete(ask(f"city {i}", 1, 2)) for i in range(10)])
        return policy.meter.snapshot()

    told = run([server], work, price_prompt=2.0, price_completion=4.0)
    assert len(server.bodies) == 11
    assert (told["prompt_tokens"], told["completion_tokens"], told["completions"]) == (50, 40, 20)
    assert told["cost"] == pytest.approx((50 * 2.0 + 40 * 4.0) / 1e6)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (web.Response(status=429, headers={"Retry-After": "0.01"}), "rate_limit"),
        (web.json_response({"error": {"message": "busy"}}, status=503), "overloaded"),
        (web.Response(status=500), "server"),
        (web.Response(text='{"choices": [{"mess'), "garbled"),
        (web.json_response({"choices": []}), "garbled"),
        (web.json_response({"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]}), "garbled"),
        ("reset", "connection"),
        ("stall", "timeout"),
    ],
    ids=["429", "503", "500", "truncated", "no choices", "wrong n", "reset", "stall"],
)
def test_a_passing_failure_is_tried_again_and_counted(fault: Any, kind: str) -> None:
    server = TogetherServer(faults=[fault])
    told: dict[str, float] = {}

    async def work(policy: TogetherPolicy) -> Any:
        own = await policy.complete(ask("the city", 1))
        told.update(policy.meter.snapshot())
        return own

    [own] = run([server], work, timeout_s=3.0 if fault == "stall" else 60.0)
    assert own.text == f"text {server_seed(1)}.0"
    assert (told["calls"], told["retries"], told[f"fault_{kind}"]) == (1, 1, 1)


def test_a_refusal_is_final_and_does_not_repeat_the_key_that_the_server_repeats(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    told = {"error": {"message": f"Invalid API key provided: {SECRET}", "code": "invalid_api_key"}}
    server = TogetherServer(faults=[web.json_response(told, status=401)])
    with pytest.raises(PolicyError, match=r"401: Invalid API key provided: \[key\]") as caught:
        run([server], lambda policy: policy.complete(ask("the city", 1)))
    assert len(server.bodies) == 1
    assert SECRET not in "".join(chain(caught.value))
    assert SECRET not in caplog.text


def chain(error: BaseException | None) -> list[str]:
    """Every word of an error and of what it came from."""
    told = []
    while error is not None:
        told += [str(error), repr(error), repr(vars(error))]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return told


def test_a_missing_key_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOGETHER_API_KEY")
    with pytest.raises(PolicyError, match="TOGETHER_API_KEY"):
        TogetherPolicy("small")


@pytest.mark.parametrize(
    "lie",
    [
        web.json_response({**completion({"seed": 1}), "error": {"message": f"upstream of {SECRET} is away"}}),
        web.Response(text=f"<p>{'x' * 280} {SECRET}</p>", content_type="application/json"),
        web.Response(body=gzip.compress(bytes(2**21)), headers={"Content-Encoding": "gzip"}),
    ],
    ids=["an error", "HTML", "a bomb"],
)
def test_a_lie_is_a_failure_without_the_key_and_is_tried_again(lie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leret.http.messages, "_MAX_BYTES", 2**20)
    server = TogetherServer([lie] * 3)
    with pytest.raises(PolicyError, match="gave up after 2 attempts") as caught:
        run([server], lambda policy: policy.complete(ask("the city", 1)), max_retries=1)
    assert SECRET[:8] not in str(caught.value)
    assert len(server.bodies) == 2
