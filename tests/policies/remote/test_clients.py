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
from tests.policies.servers import ChatServer

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("LERET_CLIENTS", ROOT / ".venv-clients")) / "bin/python"
WHY = f"{PYTHON} is missing: the official clients need an environment of their own; run `make clients`"

pytestmark = [pytest.mark.clients, pytest.mark.skipif(not PYTHON.is_file(), reason=WHY)]

LOGPROBS = {
    "together": {"tokens": ["Ni", "le"], "token_ids": [5, 6], "token_logprobs": [-0.5, -1.0]},
    "tgi": {"content": [{"token": t, "logprob": p, "top_logprobs": []} for t, p in (("Ni", -0.5), ("le", -1.0))]},
}


def without_nulls(value):
    """Leave out what a client sends for a key that is not set."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None and key != "stream"}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


class Service(ChatServer):
    """Answers with all fields that the services' API documents."""

    def __init__(self, kind, reason):
        super().__init__()
        self.kind, self.reason = kind, reason

    async def route(self, request, body):
        message = {"role": "assistant", "content": "Nile"}
        n = body.get("n") or 1
        choices = [
            {"index": i, "message": message, "finish_reason": self.reason, "logprobs": LOGPROBS[self.kind]}
            for i in range(n)
        ]
        answer = {"id": "a", "object": "chat.completion", "created": 1, "model": body["model"], "choices": choices}
        answer |= {"system_fingerprint": "3.3.7", "prompt": []}
        usage = {"prompt_tokens": 7, "completion_tokens": 2 * n, "total_tokens": 7 + 2 * n}
        return web.json_response({**answer, "usage": usage})


def exchange(kind, reason, seeds=(1,)):
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
    ("kind", "reason", "finish"),
    [("together", "eos", "stop"), ("together", "length", "length"), ("tgi", "eos_token", "stop")],
)
def test_request_and_answer_are_those_of_the_official_client(kind, reason, finish):
    [completion], parsed, ours, theirs = exchange(kind, reason)
    model = {"model": "tgi"} if kind == "tgi" else {}  # its client has no model names
    assert without_nulls(theirs) == {**ours, **model}
    [choice] = parsed["choices"]
    assert (completion.text, reason) == (choice["message"]["content"], choice["finish_reason"])
    assert completion.finish_reason == finish
    logprobs = choice["logprobs"]
    values = logprobs.get("token_logprobs") or [token["logprob"] for token in logprobs["content"]]
    assert completion.logprobs == tuple(values)
    usage = parsed["usage"]
    counts = completion.n_prompt_tokens, completion.n_completion_tokens
    assert counts == (usage["prompt_tokens"], usage["completion_tokens"])


def test_several_samples_are_one_request_of_togethers_client():
    completions, parsed, ours, theirs = exchange("together", "stop", (1, 2, 3))
    assert (ours["n"], theirs) == (3, ours)
    assert [completion.text for completion in completions] == [
        choice["message"]["content"] for choice in parsed["choices"]
    ]
