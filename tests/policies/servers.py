"""Loopback servers with the documented protocol of chat completions, and with faults."""

import asyncio

from aiohttp import web

from leret.config.policy import PolicySettings
from leret.policies.load import make_policy, probe
from tests.http.servers import Served, serving
from tests.policies.conftest import ask


def run(server, work, **settings):
    """Run ``work`` on a policy of the server, without retries by default."""

    async def main():
        async with serving(server, under="/v1") as urls:
            values = {"kind": "openai", "model": "tiny", "urls": urls, "retry_for_s": 0, **settings}
            policy = make_policy(PolicySettings.model_validate(values))
            try:
                return await work(policy)
            finally:
                await policy.aclose()
                await policy.aclose()

    return asyncio.run(main())


def asked(server, *seeds, temperature=1.0, stop=(), **settings):
    request = ask("the city", *(seeds or (1,)), temperature=temperature, stop=stop)
    return run(server, lambda policy: policy.complete(request), **settings)


def probed(*servers, path="/v1", **settings):
    async def main():
        async with serving(*servers) as urls:
            values = {"kind": "openai", "model": "tiny", "urls": [url + path for url in urls], **settings}
            await probe(PolicySettings.model_validate(values))

    asyncio.run(main())


def refusal(message, status=400):
    return web.json_response({"error": {"message": message}}, status=status)


class ChatServer(Served):
    """OpenAI's and Together's chat completions under /v1; settings become attributes."""

    models: tuple[str, ...] = ()  # that it lists; none leaves the route out
    unknown: tuple[str, ...] = ()  # names that it refuses
    most_n = 100  # choices of a request; 1 ignores ``n``, as some servers do
    strict = False  # refuses vLLM's extension
    bare_list = False  # lists models as Together does
    key: str | None = None

    def __init__(self, faults=None, **settings):
        super().__init__(faults)
        vars(self).update(settings)

    async def route(self, request, body):
        if request.path not in {"/v1/chat/completions", *(["/v1/models"] if self.models else [])}:
            return web.Response(status=404)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return refusal("wrong key", 401)
        if request.path == "/v1/models":
            models = [{"id": name} for name in self.models]
            return web.json_response(models if self.bare_list else {"data": models})
        if body["model"] in self.unknown:
            return refusal(f"no model {body['model']}", 404)
        n = body.get("n", 1)
        if n > self.most_n > 1 or (self.strict and "return_token_ids" in body):
            return refusal("unknown or too much")
        return web.json_response(completion({**body, "n": min(n, self.most_n)}))


class TgiServer(ChatServer):
    """text-generation-inference: ignores ``n``, refuses a ``top_p`` of 1, and sends the stop string."""

    most_n = 1
    models = ("/models/tiny",)

    async def route(self, request, body):
        if body is not None and body.get("top_p") == 1:
            return refusal("Input validation error: `top_p` must be > 0.0 and < 1.0", 422)
        return await super().route(request, body)


def completion(body):
    n, logprobs = body.get("n", 1), {"token_ids": [5, 6], "tokens": ["text", "x"], "token_logprobs": [-0.5, -1.0]}
    one = {"finish_reason": "stop", "logprobs": logprobs if body.get("logprobs") else None}
    texts = [f"text {body.get('seed')}.{index}{(body.get('stop') or [''])[0]}" for index in range(n)]
    choices = [{"index": i, "message": {"role": "assistant", "content": text}, **one} for i, text in enumerate(texts)]
    return {"choices": choices, "usage": {"prompt_tokens": 5, "completion_tokens": 2 * n}}
