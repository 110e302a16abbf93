import asyncio
import json
import logging
import re
from dataclasses import replace

import pytest
from aiohttp import web
from typer.testing import CliRunner

from leret.cli.app import app
from leret.core import yaml
from leret.core.errors import PolicyError
from leret.policies.remote import refusals
from tests.http.servers import serving
from tests.policies.conftest import ask
from tests.policies.servers import ChatServer, refusal, run

STYLES = {
    "OpenAI": lambda key: {
        "error": {
            "message": f"Unsupported parameter: '{key}' is not supported with this model. Use 'max_other' instead.",
            "type": "invalid_request_error",
            "param": key,
            "code": "unsupported_parameter",
        }
    },
    "OpenAI's param": lambda key: {"error": {"message": "Unsupported parameter.", "param": key}},
    "Mistral": lambda key: {
        "detail": [
            {"type": "extra_forbidden", "loc": ["body", key], "msg": "Extra inputs are not permitted", "input": 1}
        ]
    },
    "Mistral's message": lambda key: {"message": {"detail": [{"type": "extra_forbidden", "loc": ["body", key]}]}},
    "vLLM": lambda key: {
        "object": "error",
        "message": f"[{{'type': 'extra_forbidden', 'loc': ('body', '{key}'), 'msg': 'Extra inputs are not permitted', "
        "'input': {'temperature': 1.0, 'top_p': 1.0, 'seed': 3}}]",
        "param": None,
    },
    "no name": lambda key: {"error": "bad request"},
}
KEYS = (
    *("temperature", "top_p", "max_tokens", "seed", "n", "stop"),
    *("logprobs", "return_token_ids", "chat_template_kwargs"),
)
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


def crowd(server, n=32, samples=3, **changes):
    """Send ``n`` requests at once, then one more, and return the completions."""
    requests = [replace(ask(f"city {i}", *range(samples)), stop=("\n",), **changes) for i in range(n)]

    async def work(policy):
        answers = await asyncio.gather(*map(policy.complete, requests))
        return [*answers, await policy.complete(replace(ask("last", *range(samples)), stop=("\n",), **changes))]

    return run(server, work, logprobs=True, enable_thinking=False, concurrency=64)


@pytest.mark.parametrize(
    ("key", "style"), [*((key, "OpenAI") for key in KEYS), *(("top_p", style) for style in STYLES if style != "OpenAI")]
)
def test_a_refused_key_is_left_out_with_one_note(key, style, caplog):
    server = Picky(refused=(key,), style=style, status=422 if "Mistral" in style else 400)
    completions = crowd(server)
    assert [len(some) for some in completions] == [3] * 33
    last = server.bodies[-1]
    sent = {*KEYS} - {key} - ({"n"} if key == "n" else set())
    assert sent <= {*last}, "another key was left out"
    assert (key in last, last.get(RENAMED.get(key, key)) is not None) == (False, key in RENAMED)
    [note] = notes(caplog)
    assert f"refuses the request key {key}: " in note
    assert len(server.bodies) < 33 * 5 if key == "n" else len(server.bodies) < 33 * 2 + 20


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
    class OnlyDefault(ChatServer):
        async def route(self, request, body):
            if body["temperature"] != 1 if "temperature" in body else False:
                return refusal(
                    "Unsupported value: 'temperature' does not support 0.7. Only the default (1) is supported."
                )
            return await super().route(request, body)

    async def work(policy):
        await policy.complete(ask("x", 1, temperature=0.7))
        return await policy.complete(ask("x", 1, temperature=1.0))

    server = OnlyDefault()
    run(server, work)
    assert [body.get("temperature") for body in server.bodies] == [0.7, None, 1.0]
    assert len(notes(caplog)) == 1


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "max_tokens is too large: 100000. This model supports at most 16384 completion tokens"),
        (400, "This model's maximum context length is 64 tokens; you requested max_tokens 100"),
        (
            400,
            "Could not finish the message because max_tokens or model output limit was reached. Try higher max_tokens",
        ),
        (404, "The model `x` does not exist; temperature"),
        (500, "Conversation roles must alternate user/assistant; temperature"),
    ],
)
def test_a_request_that_fails_for_another_reason_keeps_its_keys(status, message, caplog):
    class Refusing(ChatServer):
        async def route(self, request, body):
            return web.json_response({"error": {"message": message}}, status=status)

    server = Refusing()
    with pytest.raises(PolicyError, match=re.escape(message[:20])):
        run(server, lambda policy: policy.complete(ask("x", 1, temperature=0.7)))
    assert (len(server.bodies), notes(caplog)) == (1, [])


def test_an_invalid_prompt_costs_no_trials_once_the_keys_are_accepted(caplog):
    class Filtering(ChatServer):
        async def route(self, request, body):
            if "bad" in json.dumps(body["messages"]):
                return refusal("request refused")
            return await super().route(request, body)

    async def work(policy):
        await policy.complete(ask("good", 1))
        with pytest.raises(PolicyError, match="request refused"):
            await policy.complete(ask("bad", 1))
        return await policy.complete(ask("good", 1))

    server = Filtering()
    run(server, work)
    assert (len(server.bodies), notes(caplog)) == (3, [])
    server = Filtering()
    with pytest.raises(PolicyError, match="request refused"):
        run(server, lambda policy: policy.complete(ask("bad", 1)))
    assert (len(server.bodies) < 12, notes(caplog)) == (True, [])


def test_sampling_and_evaluation_run_without_a_refused_key(tmp_path, caplog):
    recipe, evaluation, run_path = tmp_path / "r.yaml", tmp_path / "e.yaml", tmp_path / "run"
    server = Picky(refused=("temperature",), models=("m",))
    sections = {
        "data": {"kind": "world", "limit": 4, "options": {}},
        "program": {"path": "pipelines/multihop.py:MultiHop", "adapter": {"kind": "compact"}},
        "sampling": {"prompts": 1, "samples": 2},
    }
    keys = {"enable_thinking": False, "logprobs": True, "retry_for_s": 0, "top_p": 0.9}
    evaluation.write_text(yaml.dump({"systems": ["base"], "limit": 2, "measures": ["recall"]}))

    async def main():
        async with serving(server, under="/v1") as urls:
            policy = {"kind": "openai", "model": "m", "urls": urls, **keys}
            recipe.write_text(yaml.dump({**sections, "policy": policy}))
            for command in (["sample", str(recipe)], ["eval", str(evaluation)]):
                result = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--run", str(run_path)])
                assert result.exit_code == 0, result.output
                assert len(notes(caplog)) == 1
                forget()  # each command is a process of its own
                caplog.clear()

    asyncio.run(main())


def forget():
    refusals.refusals_of.cache_clear()
    refusals._note.cache_clear()


@pytest.fixture(autouse=True)
def _fresh(caplog):
    caplog.set_level(logging.WARNING, "leret")
    forget()
