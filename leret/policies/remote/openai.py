"""A policy behind servers that speak OpenAI's chat completions: vLLM, SGLang, TGI, llama.cpp, OpenAI."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leret.core.errors import PolicyError
from leret.core.types import digest
from leret.core.usage import UsageMeter
from leret.http.secrets import Key
from leret.policies.base import Completion, Request
from leret.policies.remote.chat import Chat
from leret.policies.remote.dispatch import Dispatcher
from leret.policies.remote.replies import completions_of
from leret.policies.remote.transport import Transport


class OpenAIPolicy:
    """Implements ``Policy`` over HTTP; how it samples is `Chat`'s.

    Args:
        model: its name on the server.
        urls: base URLs ending in /v1; the least busy gets the next request, and one that fails rests for a while.
        api_key_env: environment variable that holds the key; None sends none.
        logprobs: ask for the log-probabilities of the chosen tokens, and (vLLM) for their ids.
        enable_thinking: sent for the server's chat template, as vLLM takes it; None sends nothing.
        dispatch: of `Dispatcher`: ``timeout_s``, ``deadline_s``, ``concurrency``, ``max_retries``, prices.

    Raises:
        PolicyError: no URL is given, or the key's variable is not set.
    """

    def __init__(
        self,
        model: str,
        urls: Sequence[str],
        *,
        api_key_env: str | None = None,
        logprobs: bool = False,
        enable_thinking: bool | None = None,
        **dispatch: Any,
    ) -> None:
        if not urls:
            raise PolicyError("policy.urls is empty; give the server's base URL, as in http://127.0.0.1:8000/v1")
        self.model = model
        self.api_key_env = api_key_env
        self.logprobs = logprobs
        self.enable_thinking = enable_thinking
        self._dispatcher = Dispatcher(urls, **dispatch)
        self._transport = Transport(self._dispatcher, Key.of(api_key_env))
        self._chat = Chat(model, self._send, self.meter, logprobs=logprobs, enable_thinking=enable_thinking)

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
        return self._dispatcher.urls

    @property
    def meter(self) -> UsageMeter:
        """What was asked, what failed, what it cost."""
        return self._dispatcher.meter

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
        return await self._chat.complete(request)

    async def served_models(self) -> list[str]:
        """The names that the server lists under /models.

        Raises:
            PolicyError: it does not answer.
        """
        return await self._transport.get("/models", _model_names)

    async def aclose(self) -> None:
        """Close the running event loop's connections. May be called twice."""
        await self._transport.aclose()

    async def _send(self, body: dict[str, Any], n: int | None) -> list[Completion]:
        return await self._transport.post(
            "/chat/completions", body, lambda told, url, headers: completions_of(told, n, body["max_tokens"], url)
        )


def _model_names(told: bytes, url: str, headers: Mapping[str, str]) -> list[str]:
    return [str(entry["id"]) for entry in json.loads(told)["data"]]
