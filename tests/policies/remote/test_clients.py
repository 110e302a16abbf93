"""Requests and answers of the official clients of Together and TGI: `make clients`, then `pytest -m clients`."""

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from leret.config.policy import PolicySettings
from leret.policies.load import make_policy
from tests.http.servers import serving
from tests.policies.conftest import ask
from tests.policies.servers import ChatServer, completion

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("LERET_CLIENTS", ROOT / ".venv-clients")) / "bin/python"
WHY = f"{PYTHON} is missing: the official clients need an environment of their own; run `make clients`"

pytestmark = [pytest.mark.clients, pytest.mark.skipif(not PYTHON.is_file(), reason=WHY)]

TOKENS = [{"token": token, "logprob": value, "top_logprobs": []} for token, value in (("Ni", -0.5), ("le", -1.0))]
LOGPROBS = {"together": {}, "tgi": {"logprobs": {"content": TOKENS}}}
"""Together's are those of `completion`."""


def without_nulls(value):
    """Leave out what a client sends for a key that is not set."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None and key != "stream"}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


class Service(ChatServer):
    """Answers with all fields that the services' API documents."""

    def __init__(self, kind, reason):
        super().__init__()
        self.choice = {"finish_reason": reason, **LOGPROBS[kind]}

    async def route(self, request, body):
        answer = completion({**body, "n": body.get("n") or 1})
        answer["choices"] = [choice | self.choice for choice in answer["choices"]]
        answer["usage"]["total_tokens"] = sum(answer["usage"].values())
        fields = {"id": "a", "object": "chat.completion", "created": 1, "model": body["model"], "prompt": []}
        return web.json_response({**answer, **fields, "system_fingerprint": "3.3.7"})


def exchange(kind, reason, seeds):
    """Return leret's completions, the client's parsed answer, and the two request bodies."""
    server = Service(kind, reason)

    async def main():
        async with serving(server) as [url]:
            keys = {"logprobs": True} if kind == "together" else {}
            settings = {"kind": kind, "model": "tiny", "urls": [f"{url}/v1"], **keys}
            policy = make_policy(PolicySettings.model_validate(settings))
            completions = await policy.complete(replace(ask("Which river?", *seeds), top_p=0.9))
            await policy.aclose()
            body = server.bodies[-1]
            script = Path(__file__).parent / "official_clients.py"
            command = [PYTHON, script, kind, url, json.dumps(body)]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            return completions, json.loads(done.stdout), body, server.bodies[-1]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "reason", "seeds"),
    [("together", "eos", (1, 2, 3)), ("together", "length", (1,)), ("tgi", "eos_token", (1,))],
)
def test_request_and_answer_are_those_of_the_official_client(kind, reason, seeds):
    completions, parsed, ours, theirs = exchange(kind, reason, seeds)
    model = {"model": "tgi"} if kind == "tgi" else {}  # its client has no model names
    assert without_nulls(theirs) == {**ours, **model}
    finish, usage = "length" if reason == "length" else "stop", parsed["usage"]
    assert sum(sample.n_completion_tokens for sample in completions) == usage["completion_tokens"]
    for sample, choice in zip(completions, parsed["choices"], strict=True):
        assert (sample.text, reason) == (choice["message"]["content"], choice["finish_reason"])
        assert (sample.finish_reason, sample.n_prompt_tokens) == (finish, usage["prompt_tokens"])
        logprobs = choice["logprobs"]
        values = logprobs.get("token_logprobs") or [token["logprob"] for token in logprobs["content"]]
        assert sample.logprobs == tuple(values)
