"""A chat server that answers 200 and lies: its answers are failures with their cause, and never completions."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from typing import Any

import leret.http.messages
import pytest
from aiohttp import web

from leret.core.errors import PolicyError
from leret.policies.remote import dispatch
from leret.policies.remote.openai import OpenAIPolicy
from tests.policies.conftest import ask
from tests.policies.servers import ChatServer, completion, serving

SECRET = "sk-0123456789abcdef"
ANSWER = completion({"seed": 1})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.01)
    monkeypatch.setenv("TINY_KEY", SECRET)


def choice(message: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The answer with its choice changed."""
    own = {**ANSWER["choices"][0], **changes}
    own["message"] = {**own["message"], **(message or {})}
    return {**ANSWER, "choices": [own]}


def usage(**counts: Any) -> dict[str, Any]:
    return {**ANSWER, "usage": counts}


def logprob(value: str) -> str:
    """The answer with a log-probability that is written so."""
    told = json.dumps(choice(logprobs={"content": [{"token": "a", "logprob": 0}]}))
    return told.replace('"logprob": 0', f'"logprob": {value}')


LIES: dict[str, tuple[Any, str]] = {
    "an error beside the choices": ({**ANSWER, "error": {"message": "upstream is away"}}, "upstream is away"),
    "an error in a choice": (choice(error={"message": "out of memory"}, finish_reason="error"), "out of memory"),
    "a request that was aborted": (choice(finish_reason="abort"), "finish_reason abort"),
    "a content filter": (choice(finish_reason="content_filter"), "finish_reason content_filter"),
    "a tool call": (choice({"content": None}, finish_reason="tool_calls"), "finish_reason tool_calls"),
    "reasoning alone": (choice({"content": "", "reasoning_content": "hmm"}), "reasoning and no content"),
    "reasoning cut off": (choice({"content": None, "reasoning": "hmm"}, finish_reason="length"), "policy.max_tokens"),
    "deep JSON": ("[" * 200_000, "recursion"),
    "deep JSON in a field": ('{"choices": ' + "[" * 900 + "]" * 900 + "}", "choices|chat completion"),
    "infinite usage": (usage(completion_tokens=float("inf")), "infinity"),
    "negative usage": (usage(completion_tokens=-5), "below 0"),
    "an infinite token id": (choice(token_ids=[float("inf")]), "infinity"),
    "a log-probability of 400 digits": (logprob("9" * 400), "too large"),
    "a log-probability that repeats the key": (logprob('"' + "x" * 140 + SECRET + '"'), "could not convert"),
    "a log-probability that is none": (logprob("NaN"), "log-probability"),
    "a log-probability above 0": (logprob("0.5"), "log-probability"),
    "a text far above max_tokens": (choice({"content": "a" * 10_000_000}), "10000000 characters for max_tokens=8"),
    "HTML that repeats the key": (f"<p>you sent Bearer {SECRET}</p>", r"you sent Bearer \[key\]"),
    "HTML that repeats a part of the key": ("<p>" + "x" * 280 + f" {SECRET}</p>", "no chat completion"),
}


def asked(server: ChatServer, **settings: Any) -> Any:
    async def main() -> Any:
        async with serving(server, under="/v1") as urls:
            policy = OpenAIPolicy("m", urls, api_key_env="TINY_KEY", **settings)
            try:
                return await policy.complete(ask("the city", 1, max_tokens=8))
            finally:
                await policy.aclose()

    return asyncio.run(main())


def response(lie: Any) -> web.Response:
    return web.Response(text=lie if isinstance(lie, str) else json.dumps(lie), content_type="application/json")


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_a_failure_with_its_cause_and_is_tried_again(name: str) -> None:
    lie, cause = LIES[name]
    server = ChatServer([response(lie)] * 2)
    with pytest.raises(PolicyError, match=f"(?i)/v1/chat/completions .*({cause}).* gave up after 2 attempts") as caught:
        asked(server, max_retries=1)
    assert caught.value.exit_code == 1
    assert SECRET[:6] not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert asked(ChatServer([response(lie)]))[0].text.startswith("text ")


@pytest.mark.parametrize("reason", ["stop", "length", "eos", "eos_token", "stop_sequence", None])
def test_what_ends_by_itself_or_by_length_is_a_completion(reason: str | None) -> None:
    [own] = asked(ChatServer([response(choice(finish_reason=reason))]), max_retries=0)
    assert own.finish_reason == ("length" if reason == "length" else "stop")


def test_two_choices_of_one_index_are_a_failure() -> None:
    twice = {**ANSWER, "choices": [ANSWER["choices"][0]] * 2}
    policy_error = "one index"
    server = ChatServer([None, response(twice)])  # the first request finds out whether the server takes n

    async def main() -> Any:
        async with serving(server, under="/v1") as urls:
            policy = OpenAIPolicy("m", urls, max_retries=0)
            try:
                return await policy.complete(ask("the city", 1, 2))
            finally:
                await policy.aclose()

    with pytest.raises(PolicyError, match=policy_error):
        asyncio.run(main())


def test_a_server_whose_first_token_is_reasoning_is_still_asked_for_several_choices() -> None:
    probed = {**choice({"content": None, "reasoning": "h"}, finish_reason="length")}
    server = ChatServer([response({**probed, "choices": probed["choices"] * 2})])

    async def main() -> Any:
        async with serving(server, under="/v1") as urls:
            policy = OpenAIPolicy("m", urls, max_retries=0)
            try:
                return await policy.complete(ask("the city", 1, 2))
            finally:
                await policy.aclose()

    assert len(asyncio.run(main())) == 2
    assert [body.get("n") for body in server.bodies] == [2, 2]


@pytest.mark.parametrize("status", [200, 500])
def test_a_bomb_is_not_inflated_beyond_the_bound(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leret.http.messages, "_MAX_BYTES", 2**20)
    bomb = gzip.compress(bytes(200 * 2**20), 1)
    server = ChatServer([web.Response(status=status, body=bomb, headers={"Content-Encoding": "gzip"})])
    tracemalloc.start()
    try:
        with pytest.raises(PolicyError, match="more than 1048576 bytes"):
            asked(server, max_retries=0)
        assert tracemalloc.get_traced_memory()[1] < 30 * 2**20
    finally:
        tracemalloc.stop()


def test_a_retry_after_of_an_absurd_date_is_as_good_as_none() -> None:
    headers = {"Retry-After": "Wed, 21 Oct 2015 07:28:00 +99999999999999999999"}
    server = ChatServer([web.Response(status=429, headers=headers)])
    assert len(asked(server)) == 1
    assert len(server.bodies) == 2
