"""OpenAI-compatible server that answers at once, or fails on request, for benchmarks of the sampler.

    python benchmarks/correctness/instant_server.py [--port 0] [--faults 0.3] [--stall-s 30] [--count]

Prints its base URL and serves until it is stopped. A choice is a few words of the question, and depends only on the
request's messages and seed. With ``--count``, every completion contains the name of its request, and ``GET /asked``
returns how often each request came and how often it got a good answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any

from aiohttp import web

FAULTS = ("429", "500", "reset", "stall", "truncated", "empty", "wrong n")

_QUESTION = re.compile(r"(?:\[\[ ## (?:question|claim) ## \]\]\n|^(?:question|claim): )(.*)", re.MULTILINE)


class InstantServer:
    """The request handlers and their counters.

    Args:
        faults: share of the requests that get a faulty answer.
        stall_s: seconds that a stalled answer takes.
        count: count every request.
        seed: seed for the faults.
    """

    def __init__(self, faults: float = 0.0, stall_s: float = 30.0, count: bool = False, seed: int = 0) -> None:
        self.faults = faults
        self.stall_s = stall_s
        self.count = count
        self.rng = random.Random(seed)
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.n_answered = 0
        self.failed: Counter[str] = Counter()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Dispatch a request to its route."""
        if request.path.endswith("/chat/completions"):
            return await self.chat(request)
        if request.path.endswith("/models"):
            return web.json_response({"object": "list", "data": [{"id": "instant", "object": "model"}]})
        if request.path == "/count":
            return web.json_response({"answered": self.n_answered})
        if request.path == "/asked":
            counts = {"asked": self.asked, "answered": self.answered, "failed": self.failed}
            return web.json_response(counts)
        return web.json_response({"error": {"message": f"no route {request.path}"}}, status=404)

    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer ``POST /v1/chat/completions``."""
        raw = await request.read()
        body = json.loads(raw)
        name = blake2b(raw, digest_size=8).hexdigest()
        if self.count:
            self.asked[name] += 1
        answer = completion(body, name, named=self.count)
        if self.faults and self.rng.random() < self.faults:
            fault = self.rng.choice(FAULTS)
            self.failed[fault] += 1
            return await self.fail(fault, request, answer)
        self.n_answered += 1
        if self.count:
            self.answered[name] += 1
        return reply(answer)

    async def fail(self, fault: str, request: web.BaseRequest, answer: dict[str, Any]) -> web.StreamResponse:
        """Return a faulty answer."""
        match fault:
            case "429":
                return web.json_response(
                    {"error": {"message": "slow down"}}, status=429, headers={"Retry-After": "0.02"}
                )
            case "500":
                return web.json_response({"error": {"message": "boom"}}, status=500)
            case "reset":
                assert request.transport is not None
                request.transport.abort()
            case "stall":
                await asyncio.sleep(self.stall_s)
            case "truncated":
                return web.Response(text=json.dumps(answer)[:-25], content_type="application/json")
            case "empty":
                answer["choices"] = []
            case "wrong n":
                answer["choices"].append({**answer["choices"][-1], "index": len(answer["choices"])})
        return reply(answer)


def completion(body: dict[str, Any], name: str, named: bool) -> dict[str, Any]:
    """Return the answer to a request, which depends only on the request's content."""
    last = body["messages"][-1]["content"]
    found = _QUESTION.search(last)
    words = (found[1] if found else last[:200]).split()
    chat = "[[ ## " in last
    rng = random.Random(name)
    n = body.get("n", 1)
    choices = []
    for index in range(n):
        query = " ".join(rng.sample(words, min(len(words), rng.randint(2, 6))))
        text = f"{query} r{name}" if named else query
        if chat:
            text = f"[[ ## query ## ]]\n{text}\n\n[[ ## completed ## ]]"
        choices.append({"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"})
    prompt = sum(len(message["content"]) for message in body["messages"]) // 5
    usage = {"prompt_tokens": prompt, "completion_tokens": 8 * n, "total_tokens": prompt + 8 * n}
    return {"id": name, "object": "chat.completion", "model": body["model"], "choices": choices, "usage": usage}


def reply(answer: dict[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(answer).encode(), content_type="application/json")


async def serve(server: InstantServer, port: int, ready: Callable[[str], None]) -> None:
    """Serve until cancelled."""
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] = server.handle
    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    ready(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--faults", type=float, default=0.0, help="share of faulty answers")
    parser.add_argument("--stall-s", type=float, default=30.0, help="seconds that a stalled answer takes")
    parser.add_argument("--count", action="store_true", help="count requests by their content")
    parser.add_argument("--seed", type=int, default=0, help="seed for the faults")
    asked = parser.parse_args()
    server = InstantServer(asked.faults, asked.stall_s, asked.count, asked.seed)
    try:
        asyncio.run(serve(server, asked.port, lambda url: print(url, flush=True)))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
