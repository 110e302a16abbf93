"""Loopback servers that speak the documented protocols of chat completions and TGI, faults included."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from leret.config.policy import PolicySettings
from leret.policies.load import make_policy
from tests.http.servers import Served, serving
from tests.policies.conftest import ask

__all__ = ["ChatServer", "Served", "TgiServer", "asked", "completion", "run", "serving"]


def run(servers: list[Served], work: Callable[[Any], Awaitable[Any]], **settings: Any) -> Any:
    """What is done with the policy of servers that speak its protocol; it tries once unless it is told otherwise."""

    async def main() -> Any:
        async with serving(*servers, under="" if settings.get("kind") == "tgi" else "/v1") as urls:
            given = {"kind": "openai", "model": "tiny", "urls": urls, "retry_for_s": 0, **settings}
            policy = make_policy(PolicySettings.model_validate(given))
            try:
                return await work(policy)
            finally:
                await policy.aclose()
                await policy.aclose()

    return asyncio.run(main())


def asked(server: Served, *seeds: int, **settings: Any) -> Any:
    """The completions of a prompt."""
    return run([server], lambda policy: policy.complete(ask("the city", *(seeds or (1,)))), **settings)


class ChatServer(Served):
    """OpenAI's and Together's chat completions under /v1.

    Args:
        faults: gone through first.
        models: that it lists; none leaves the route out.
        unknown: names that it refuses.
        most_n: choices of a request; 1 ignores ``n``, as some servers do.
        strict: refuses vLLM's extension.
    """

    def __init__(
        self,
        faults: list[Any] | None = None,
        *,
        models: tuple[str, ...] = (),
        unknown: tuple[str, ...] = (),
        most_n: int = 100,
        strict: bool = False,
    ) -> None:
        super().__init__(faults)
        self.models, self.unknown = models, unknown
        self.most_n, self.strict = most_n, strict
        self.key: str | None = None

    async def route(self, request: web.Request, body: Any) -> web.StreamResponse:
        if request.path not in {"/v1/chat/completions", *(["/v1/models"] if self.models else [])}:
            return web.Response(status=404)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in self.models]})
        if body["model"] in self.unknown:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        n = body.get("n", 1)
        if n > self.most_n > 1 or (self.strict and "return_token_ids" in body):
            return web.json_response({"error": {"message": "unknown or too much"}}, status=400)
        return web.json_response(completion({**body, "n": min(n, self.most_n)}))


class TgiServer(Served):
    """text-generation-inference's ``POST /generate`` and ``POST /``."""

    def __init__(self, faults: list[Any] | None = None, *, root_only: bool = False, most_best_of: int = 8) -> None:
        super().__init__(faults)
        self.root_only = root_only
        self.most_best_of = most_best_of
        self.tells_prompt_tokens = True

    async def route(self, request: web.Request, body: Any) -> web.StreamResponse:
        if request.path not in ({"/"} if self.root_only else {"/", "/generate"}):
            return web.Response(status=404)
        parameters = body["parameters"]
        n = parameters.get("best_of") or 1
        if n > self.most_best_of:
            told = f"Input validation error: `best_of` must be > 0 and <= {self.most_best_of}. Given: {n}"
            return web.json_response({"error": told, "error_type": "validation"}, status=422)
        seed = parameters.get("seed")
        stop = (parameters.get("stop") or [""])[0]
        sequences = [self._sequence(f"text {seed}.{index}{stop}", seed, stop) for index in range(n)]
        best = sequences[0]
        details = {key: value for key, value in best.items() if key != "generated_text"}
        if n > 1:
            details["best_of_sequences"] = sequences[1:]
        answer = {"generated_text": best["generated_text"], "details": details}
        headers = {"x-prompt-tokens": "7"} if self.tells_prompt_tokens else {}
        return web.json_response([answer] if request.path == "/" else answer, headers=headers)

    def _sequence(self, text: str, seed: int | None, stop: str) -> dict[str, Any]:
        tokens = [
            {"id": 11, "text": "text", "logprob": -0.5, "special": False},
            {"id": 12, "text": text[4:], "logprob": -1.25, "special": False},
        ]
        if not stop:
            tokens.append({"id": 2, "text": "</s>", "logprob": -0.125, "special": True})
        return {
            "generated_text": text,
            "finish_reason": "stop_sequence" if stop else "eos_token",
            "generated_tokens": len(tokens),
            "seed": seed,
            "prefill": [],
            "tokens": tokens,
        }


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """A chat completion; the text names the seed."""
    n = body.get("n", 1)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": f"text {body['seed']}.{index}"},
            "finish_reason": "stop",
            "seed": body["seed"],
            "logprobs": {"token_ids": [5, 6], "tokens": ["text", "x"], "token_logprobs": [-0.5, -1.0]}
            if body.get("logprobs")
            else None,
        }
        for index in range(n)
    ]
    usage = {"prompt_tokens": 5, "completion_tokens": 2 * n, "total_tokens": 5 + 2 * n}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": choices, "usage": usage}
