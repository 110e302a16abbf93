"""The Together policy with the real SDK against a loopback server that speaks Together's protocol."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

import leret.http.answers
from leret.config.policy import TogetherPolicySettings
from leret.core.errors import ConfigError, PolicyError
from tests.policies.conftest import ask
from tests.policies.servers import ChatServer, completion, serving

pytest.importorskip("together", reason="pip install 'leret[together]'")

from leret.policies.remote.together import TogetherPolicy

SECRET = "tgp_v1_this_is_the_secret"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOGETHER_API_KEY", SECRET)


def run(server: ChatServer, work: Callable[[TogetherPolicy], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with serving(server, under="/v1") as urls:
            given = {"model": "small", "urls": tuple(urls), "retry_for_s": 0, **settings}
            policy = TogetherPolicy(TogetherPolicySettings.model_validate(given))
            try:
                return await work(policy)
            finally:
                await policy.aclose()
                await policy.aclose()

    return asyncio.run(main())


def one(policy: TogetherPolicy) -> Awaitable[Any]:
    return policy.complete(ask("the city", 1))


def test_a_sample_comes_back_through_the_sdk_with_tokens_and_log_probabilities() -> None:
    server = ChatServer()
    [own] = run(server, lambda policy: policy.complete(ask("the city", 1, stop=("\n",))), logprobs=True)
    assert own.text == "text 1.0"
    assert (own.token_ids, own.logprobs) == ((5, 6), (-0.5, -1.0))
    assert (own.n_prompt_tokens, own.n_completion_tokens) == (5, 2)
    [body] = server.bodies
    assert (body["model"], body["stop"], body["logprobs"], body["max_tokens"]) == ("small", ["\n"], 1, 8)
    assert server.requests[0].headers["Authorization"] == f"Bearer {SECRET}"


def test_several_samples_are_one_request_after_a_probe() -> None:
    server = ChatServer()
    own = run(server, lambda policy: policy.complete(ask("the city", 1, 2, 3)))
    assert len({completion.text for completion in own}) == 3
    assert [body.get("n") for body in server.bodies] == [2, 3]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (web.Response(status=429, headers={"Retry-After": "60"}), "rate_limit"),
        (web.json_response({"error": {"message": "busy"}}, status=503), "overloaded"),
        (web.Response(text='{"choices": [{"mess'), "malformed"),
        (web.json_response({"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]}), "malformed"),
        ("reset", "connection"),
        ("stall", "timeout"),
    ],
    ids=["429", "503", "truncated", "wrong n", "reset", "stall"],
)
def test_a_failure_of_the_sdk_is_of_the_clients_kinds(fault: Any, kind: str) -> None:
    async def work(policy: TogetherPolicy) -> None:
        with pytest.raises(PolicyError, match="gave up after 1 attempt") as caught:
            await one(policy)
        assert caught.value.exit_code == 1
        assert policy.meter.snapshot()[f"fault_{kind}"] == 1

    run(ChatServer([fault]), work, timeout_s=0.5 if fault == "stall" else 60.0)


def test_a_passing_failure_is_tried_again() -> None:
    assert run(ChatServer([web.Response(status=500)]), one, retry_for_s=10.0)[0].text == "text 1.0"


def test_a_refusal_does_not_repeat_the_key_that_the_server_repeats(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told = {"error": {"message": f"Invalid API key provided: {SECRET}", "code": "invalid_api_key"}}
    server = ChatServer([web.json_response(told, status=401)])
    with pytest.raises(PolicyError, match=r"401: Invalid API key provided: \[key\]") as caught:
        run(server, one, retry_for_s=60.0)
    assert len(server.bodies) == 1
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error} {error!r} {vars(error)}"
        error = error.__cause__ or error.__context__
    assert SECRET not in caplog.text


def test_a_missing_key_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOGETHER_API_KEY")
    with pytest.raises(ConfigError, match="TOGETHER_API_KEY"):
        TogetherPolicy(TogetherPolicySettings(model="small"))


@pytest.mark.parametrize(
    "lie",
    [
        web.json_response({**completion({"seed": 1}), "error": {"message": f"upstream of {SECRET} is away"}}),
        web.Response(text=f"<p>{'x' * 280} {SECRET}</p>", content_type="application/json"),
        web.Response(body=gzip.compress(bytes(2**21)), headers={"Content-Encoding": "gzip"}),
    ],
    ids=["an error", "HTML", "a bomb"],
)
def test_a_lie_of_status_200_is_a_failure_without_the_key(lie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leret.http.answers, "MAX_BYTES", 2**20)
    with pytest.raises(PolicyError) as caught:
        run(ChatServer([lie]), one)
    assert caught.value.exit_code == 1
    assert SECRET[:8] not in str(caught.value)
