"""An OpenAI-compatible server in a thread: its completions follow from messages and seed, and it counts who asked.

It gives one choice whatever ``n`` says, so that every sample is a request with its own seed.
"""

import asyncio
import json
import random
from collections import Counter
from contextlib import ExitStack

from aiohttp import web
from anyio.from_thread import start_blocking_portal

from tests.http.servers import Served, serving
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


class SeededServer(Served):
    """Started as it is made; ``url`` is its base.

    ``broken`` says of a request's body whether it is refused, or how it is answered; ``lie`` what is changed in the
    answer to it; ``asked`` counts requests by seed; a reply takes ``delay_s``.
    """

    def __init__(self):
        super().__init__()
        self.delay_s = 0.0
        self.asked = Counter()
        self.answered = 0
        self.broken = lambda body: False
        self.lie = lambda body: {}
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(portal.wrap_async_context_manager(serving(self, under="/v1")))
            self.close = stack.pop_all().close

    @property
    def n_asked(self):
        return sum(self.asked.values())

    async def route(self, request, body):
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "seeded", "object": "model"}]})
        is_sample = body["max_tokens"] > 1  # a probe asks for a single token
        self.asked[body.get("seed")] += is_sample
        await asyncio.sleep(self.delay_s)
        if broken := self.broken(body):
            refused = web.json_response({"error": {"message": "this question is refused"}}, status=400)
            return broken if isinstance(broken, web.Response) else refused
        self.answered += is_sample
        text = " ".join(random.Random(json.dumps([body["messages"], body.get("seed")])).choices(WORDS, k=2))
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        answer = {"object": "chat.completion", "model": "seeded", "choices": [choice], "usage": usage}
        return web.json_response(answer | self.lie(body))
