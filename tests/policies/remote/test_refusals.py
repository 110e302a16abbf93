import asyncio
import logging
import re

import pytest
from aiohttp import web

from leret.core.errors import PolicyError
from leret.policies.remote import refusals
from tests.policies.conftest import ask
from tests.policies.servers import ChatServer, refusal, run

STYLES = {
    "OpenAI": lambda key: {"error": {"message": f"Unsupported parameter: '{key}'. Use 'max_other' instead."}},
    "OpenAI's param": lambda key: {"error": {"message": "Unsupported parameter.", "param": key}},
    "Mistral": lambda key: {"detail": [{"loc": ["body", key], "msg": "Extra inputs are not permitted", "input": 1}]},
    "vLLM": lambda key: {
        "message": f"[{{'loc': ('body', '{key}'), 'msg': 'Extra inputs are not permitted', "
        "'input': {'temperature': 1.0, 'top_p': 1.0, 'seed': 3}}]",
        "param": None,
    },
    "no name": lambda key: {"error": "bad request"},
}
SAMPLING = ("temperature", "top_p", "max_tokens", "seed", "n", "stop")
KEYS = (*SAMPLING, "logprobs", "return_token_ids", "chat_template_kwargs")
RENAMED = {"max_tokens": "max_completion_tokens"}


class Picky(ChatServer):
    """Refuses requests with any of the keys ``refused``, and names the first in the ``style`` of a server."""

    refused = ()
    style = "OpenAI"
    status = 400

    async def route(self, request, body):
        refused = [key for key in self.refused if key in (body or {})]
        if refused:
            return web.json_response(STYLES[self.style](refused[0]), status=self.status)
        return await super().route(request, body)


def notes(caplog):
    return [record.getMessage() for record in caplog.records if "refuses the request key" in record.getMessage()]


def crowd(server, n=8):
    """Send ``n`` requests at once, then one more, and return the completions."""
    first, *requests = [ask(f"city {i}", 0, 1, 2, stop=("\n",)) for i in range(n + 1)]

    async def work(policy):
        return [*await asyncio.gather(*map(policy.complete, requests)), await policy.complete(first)]

    return run(server, work, logprobs=True, enable_thinking=False, concurrency=64)


@pytest.mark.parametrize(
    ("key", "style"), [*((key, "OpenAI") for key in KEYS), *(("top_p", style) for style in STYLES if style != "OpenAI")]
)
def test_a_refused_key_is_left_out_with_one_note(key, style, caplog):
    server = Picky(refused=(key,), style=style, status=422 if "Mistral" in style else 400)
    completions = crowd(server)
    assert [len(some) for some in completions] == [3] * 9
    last = server.bodies[-1]
    sent = {*KEYS} - {key} - ({"n"} if key == "n" else set())
    assert sent <= {*last}, "another key was left out"
    assert (key in last, last.get(RENAMED.get(key, key)) is not None) == (False, key in RENAMED)
    [note] = notes(caplog)
    assert f"refuses the request key {key}: " in note
    assert len(server.bodies) < (9 * 5 if key == "n" else 9 * 2 + 20)


@pytest.mark.parametrize("style", ["OpenAI", "Mistral", "no name"])
def test_several_refused_keys_are_all_found(style, caplog):
    refused = ("seed", "top_p", "return_token_ids", "max_tokens")
    server = Picky(refused=refused, style=style)
    assert len(crowd(server, 3)) == 4
    last = server.bodies[-1]
    assert {"temperature", "n", "stop", "logprobs", "max_completion_tokens"} <= {*last}
    assert not {*refused} & {*last}
    assert len(notes(caplog)) == 4


def test_a_value_that_is_refused_is_not_left_out_elsewhere(caplog):
    async def work(policy):
        await policy.complete(ask("x", 1, temperature=0.7))
        return await policy.complete(ask("x", 1, temperature=1.0))

    server = ChatServer([refusal("'temperature' does not support 0.7. Only the default (1) is supported.")])
    run(server, work)
    assert [body.get("temperature") for body in server.bodies] == [0.7, None, 1.0]
    assert len(notes(caplog)) == 1


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "max_tokens is too large: 100000. This model supports at most 16384 completion tokens"),
        (400, "This model's maximum context length is 64 tokens; you requested max_tokens 100"),
        (400, "Could not finish the message because max_tokens or model output limit was reached"),
        (404, "The model `x` does not exist; temperature"),
        (500, "Conversation roles must alternate user/assistant; temperature"),
    ],
)
def test_a_request_that_fails_for_another_reason_keeps_its_keys(status, message, caplog):
    server = ChatServer([refusal(message, status)] * 9)
    with pytest.raises(PolicyError, match=re.escape(message[:20])):
        run(server, lambda policy: policy.complete(ask("x", 1, temperature=0.7)))
    assert (len(server.bodies), notes(caplog)) == (1, [])


@pytest.fixture(autouse=True)
def _fresh(caplog):
    caplog.set_level(logging.WARNING, "leret")
    refusals.refusals_of.cache_clear()
    refusals._note.cache_clear()
