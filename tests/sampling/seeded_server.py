"""An OpenAI-compatible server in a thread: its completions follow from messages and seed, and it counts who asked.

It gives one choice whatever ``n`` says, so that every sample is a request with its own seed.
"""

import asyncio
import json
import random
import threading
from collections import Counter

from aiohttp import web

from tests.sampling.fakes import WORDS, recipe_of

AWAY = {"error": {"message": "upstream is away"}}


def served(server, **sampling):
    """The recipe of the fakes, with this server's policy."""
    policy = {"kind": "openai", "model": "seeded", "urls": [server.url], "retry_for_s": 0, **sampling.pop("policy", {})}
    return recipe_of(policy=policy, **{"prompts": 1, "max_error_rate": 1.0, **sampling})


def blank(share):
    """Every so many completions are empty, which the compact adapter cannot read."""
    choice = {"index": 0, "message": {"content": " "}, "finish_reason": "stop"}
    return lambda body: {"choices": [choice]} if body["seed"] % 100 < 100 * share else {}


class SeededServer:
    """Started as it is made; ``url`` is its base.

    Args:
        delay_s: what a reply takes.

    ``broken`` says of a request's body whether it is refused, or how it is answered; ``lie`` what is changed in the
    answer to it; ``asked`` counts requests by seed.
    """

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s
        self.asked = Counter()
        self.answered = 0
        self.broken = lambda body: False
        self.lie = lambda body: {}
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(20)

    def _serve(self, started):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._open(started))
        self._loop.run_forever()

    async def _open(self, started):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        started.set()

    async def _models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "seeded", "object": "model"}]})

    async def _complete(self, request):
        body = await request.json()
        seed = body.get("seed")
        self.asked[seed] += body["max_tokens"] > 1  # no sample asks for a single token, but a probe does
        await asyncio.sleep(self.delay_s)
        if broken := self.broken(body):
            return (
                broken
                if isinstance(broken, web.Response)
                else web.json_response({"error": {"message": "this question is refused"}}, status=400)
            )
        self.answered += body["max_tokens"] > 1
        choices = [self._choice(body, seed)]
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        answer = {"object": "chat.completion", "model": "seeded", "choices": choices, "usage": usage}
        return web.json_response(answer | self.lie(body))

    def _choice(self, body, seed):
        rng = random.Random(json.dumps([body["messages"], seed]))
        text = " ".join(rng.choices(WORDS, k=2))
        return {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}

    def close(self):
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()
