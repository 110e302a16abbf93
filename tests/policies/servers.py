"""Loopback servers that speak the documented protocols of TGI and Together, faults included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

__all__ = ["ChatServer", "Served", "TgiServer", "TogetherServer", "completion", "serving"]


class Served:
    """Goes through ``faults`` before it answers: a response, ``reset`` or ``stall``; None answers.

    Keeps the bodies and the headers that it was sent.
    """

    def __init__(self, faults: list[Any] | None = None) -> None:
        self.faults = faults or []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.url = ""

    def routes(self, app: web.Application) -> None:
        raise NotImplementedError

    async def met(self, request: web.Request) -> web.StreamResponse | None:
        """The next fault; None where the request is to be answered."""
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        fault = self.faults.pop(0) if self.faults else None
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        if fault == "stall":
            await asyncio.sleep(30)
        if isinstance(fault, web.Response):
            return web.Response(status=fault.status, headers=fault.headers, body=fault.body)
        return None


class ChatServer(Served):
    """OpenAI's chat completions; lists ``models`` where there are any, and refuses the names in ``unknown``."""

    def __init__(
        self, faults: list[Any] | None = None, *, models: tuple[str, ...] = (), unknown: tuple[str, ...] = ()
    ) -> None:
        super().__init__(faults)
        self.models = models
        self.unknown = unknown
        self.key: str | None = None

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat)
        if self.models:
            app.router.add_get("/v1/models", self.list_models)

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        if fault := await self.met(request):
            return fault
        return self._refused(request) or web.json_response({"data": [{"id": name} for name in self.models]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        fault = await self.met(request)
        body = await request.json()
        self.bodies.append(body)
        if body["model"] in self.unknown:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        return fault or self._refused(request) or web.json_response(completion(body))

    def _refused(self, request: web.Request) -> web.StreamResponse | None:
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return web.json_response({"error": {"message": "wrong key"}}, status=401)


class TgiServer(Served):
    """text-generation-inference's ``POST /generate`` and ``POST /``."""

    def __init__(self, faults: list[Any] | None = None, *, root_only: bool = False, most_best_of: int = 8) -> None:
        super().__init__(faults)
        self.root_only = root_only
        self.most_best_of = most_best_of
        self.tells_prompt_tokens = True

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/", self.compat)
        if not self.root_only:
            app.router.add_post("/generate", self.generate)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, listed=False)

    async def compat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, listed=True)

    async def _generate(self, request: web.Request, listed: bool) -> web.StreamResponse:
        fault = await self.met(request)
        body = await request.json()
        self.bodies.append(body)
        if fault is not None:
            return fault
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
        return web.json_response([answer] if listed else answer, headers=headers)

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


class TogetherServer(Served):
    """Together's chat completions."""

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        fault = await self.met(request)
        body = await request.json()
        self.bodies.append(body)
        return fault if fault is not None else web.json_response(completion(body))


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """A chat completion of Together's; the text names the seed."""
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


@asynccontextmanager
async def serving(*servers: Served, under: str = "") -> AsyncIterator[list[str]]:
    """Start servers on loopback.

    Args:
        servers: to start.
        under: path of the base URLs.

    Yields:
        Their base URLs.
    """
    runners = []
    for server in servers:
        app = web.Application(client_max_size=2**28)
        server.routes(app)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}{under}"
        runners.append(runner)
    try:
        yield [server.url for server in servers]
    finally:
        for runner in runners:
            await runner.cleanup()
