"""A policy behind servers that speak OpenAI's chat completions: vLLM, SGLang, TGI, llama.cpp, OpenAI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from leret.errors import PolicyError
from leret.policies.base import Completion, Request
from leret.policies.replies import RefusedError, TryAgainError, completions_of
from leret.policies.transport import Transport
from leret.types import digest

__all__ = ["OpenAIPolicy"]


class OpenAIPolicy:
    """Implements ``Policy`` over HTTP.

    Whether the server makes several choices of one prompt is found by asking it, never assumed: some ignore ``n``
    silently. Where it does, the samples of a prompt are one request, whose seed is derived from theirs, and the server
    decides how they differ: a sample then depends on the seeds it was asked together with. Where it does not, each
    sample is a request with its own seed.

    Args:
        model: its name on the server.
        urls: base URLs ending in /v1; the least busy gets the next request, and one that fails rests for a while.
        api_key_env: environment variable that holds the key; None sends none.
        timeout_s: the deadline of an attempt.
        concurrency: requests in flight, in each event loop.
        max_retries: attempts after the first: on 429, 5xx, time-outs, resets and answers that make no sense.
        logprobs: ask for the log-probabilities of the chosen tokens.
        return_token_ids: ask for token ids (vLLM).

    Raises:
        PolicyError: no URL is given, or the key's variable is not set.
    """

    def __init__(
        self,
        model: str,
        urls: Sequence[str],
        *,
        api_key_env: str | None = None,
        timeout_s: float = 60.0,
        concurrency: int = 32,
        max_retries: int = 6,
        logprobs: bool = False,
        return_token_ids: bool = False,
    ) -> None:
        from leret.policies.load import api_key_of

        if not urls:
            raise PolicyError("policy.urls is empty; give the server's base URL, as in http://127.0.0.1:8000/v1")
        self.model = model
        self.api_key_env = api_key_env
        self.logprobs = logprobs
        self.return_token_ids = return_token_ids
        self._transport = Transport(
            urls, api_key_of(api_key_env), timeout_s=timeout_s, concurrency=concurrency, max_retries=max_retries
        )
        self._takes_n: bool | None = None

    def __repr__(self) -> str:
        return f"OpenAIPolicy({self.model!r}, {list(self.urls)!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> OpenAIPolicy:
        # Programs are deep-copied by DSPy's optimizers; their connections are not.
        return self

    @property
    def name(self) -> str:
        """The served model's name."""
        return self.model

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs, as given."""
        return tuple(endpoint.url for endpoint in self._transport.endpoints.all)

    @property
    def digest(self) -> str:
        """Names the served model, wherever it is served.

        The weights behind a name cannot be seen from here: serve new weights under a new name.
        """
        return digest("openai", self.model)

    async def complete(self, request: Request) -> list[Completion]:
        """Complete one prompt.

        Returns:
            One completion a seed, in the order of the seeds.

        Raises:
            PolicyError: the server refused the request, or went on failing.
        """
        if not request.seeds:
            raise PolicyError("a request asks for no completion; give it one seed at least")
        seeds = request.seeds if request.temperature > 0 else request.seeds[:1]
        if len(seeds) > 1 and await self._server_takes_n(request):
            joint = int(digest("joint seed", list(seeds))[:16], 16)
            return await self._ask(request, joint, len(seeds))
        each = await asyncio.gather(*[self._ask(request, seed) for seed in seeds])
        completions = [completion for one in each for completion in one]
        return completions if request.temperature > 0 else completions * len(request.seeds)

    async def served_models(self) -> list[str]:
        """The names that the server lists under /models.

        Raises:
            PolicyError: it does not answer.
        """
        return await self._transport.call("GET", "/models", None, _model_names)

    async def aclose(self) -> None:
        """Close the running event loop's connections. May be called twice."""
        await self._transport.aclose()

    async def _server_takes_n(self, request: Request) -> bool:
        """Two choices asked for: two choices back? Asked once a policy, on the first prompt."""
        if self._takes_n is None:
            probe = self._body(Request(request.messages, (0,), 1.0, 1), 0, 2)
            try:
                n = await self._transport.call("POST", "/chat/completions", probe, _n_choices)
            except RefusedError:
                n = 0  # if the request itself is at fault, the samples will say so
            self._takes_n = n == 2
        return self._takes_n

    async def _ask(self, request: Request, seed: int, n: int = 1) -> list[Completion]:
        body = self._body(request, seed, n)
        return await self._transport.call(
            "POST", "/chat/completions", body, lambda text, url: completions_of(text, n, url)
        )

    def _body(self, request: Request, seed: int, n: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(request.messages),
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
            # Not every server takes a seed of 63 bits.
            "seed": int(digest("seed", seed)[:8], 16) >> 1,
        }
        optional: dict[str, Any] = {
            "n": n if n > 1 else None,
            "stop": list(request.stop) or None,
            "logprobs": self.logprobs or None,
            "return_token_ids": self.return_token_ids or None,
        }
        return {**body, **{key: value for key, value in optional.items() if value is not None}}


def _model_names(body: str, url: str) -> list[str]:
    try:
        return [str(entry["id"]) for entry in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise TryAgainError(f"{url} lists no models ({type(error).__name__})") from error


def _n_choices(body: str, url: str) -> int:
    try:
        return len(json.loads(body)["choices"])
    except (ValueError, KeyError, TypeError) as error:
        raise TryAgainError(f"{url} sent no chat completion ({type(error).__name__})") from error
