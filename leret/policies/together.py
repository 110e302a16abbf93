"""A policy of Together AI, through its official SDK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leret.http import body_of
from leret.policies.base import Completion, Request
from leret.policies.chat import Chat
from leret.policies.dispatch import Dispatcher
from leret.policies.keys import Key
from leret.policies.meter import Meter
from leret.policies.replies import completions_of
from leret.policies.together_api import TOGETHER_URL, TogetherApi
from leret.types import digest

__all__ = ["TogetherPolicy"]


class TogetherPolicy:
    """Implements ``Policy``; how it samples is `Chat`'s.

    Args:
        model: its name at Together.
        urls: base URLs ending in /v1; none is Together's own.
        api_key_env: environment variable that holds the key.
        logprobs: ask for the log-probabilities of the chosen tokens, and for their ids.
        dispatch: of `Dispatcher`: ``timeout_s``, ``deadline_s``, ``concurrency``, ``max_retries``, prices.

    Raises:
        MissingDependency: the SDK is not installed.
        PolicyError: the key's variable is not set.
    """

    def __init__(
        self,
        model: str,
        urls: Sequence[str] = (),
        *,
        api_key_env: str | None = "TOGETHER_API_KEY",
        logprobs: bool = False,
        **dispatch: Any,
    ) -> None:
        self.model = model
        self.api_key_env = api_key_env or "TOGETHER_API_KEY"
        self._given = tuple(urls)
        self._dispatcher = Dispatcher(urls or [TOGETHER_URL], **dispatch)
        self._api = TogetherApi(self._dispatcher, Key.of(self.api_key_env))
        self._chat = Chat(
            model,
            self._send,
            self.meter,
            logprobs=int(logprobs),  # their number a token, in this API
            id_extension=False,
        )

    def __repr__(self) -> str:
        return f"TogetherPolicy({self.model!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> TogetherPolicy:
        # Programs are deep-copied by DSPy's optimizers; their connections are not.
        return self

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs, as given."""
        return self._given

    @property
    def meter(self) -> Meter:
        """What was asked, what failed, what it cost."""
        return self._dispatcher.meter

    @property
    def digest(self) -> str:
        """Names the model, however it is asked."""
        return digest("together", self.model)

    async def complete(self, request: Request) -> list[Completion]:
        """Complete one prompt.

        Returns:
            One completion a seed, in the order of the seeds.

        Raises:
            PolicyError: Together refused the request, or went on failing.
        """
        return await self._chat.complete(request)

    async def aclose(self) -> None:
        """Close the running event loop's connections. May be called twice."""
        await self._api.aclose()

    async def _send(self, body: dict[str, Any], n: int | None) -> list[Completion]:
        async def call(client: Any, url: str, timeout: Any) -> list[Completion]:
            chat = client.chat.completions.with_streaming_response
            async with chat.create(**body, timeout=timeout) as answer:
                told = await body_of(answer.iter_bytes())
            return completions_of(told, n, body["max_tokens"], url)

        return await self._api.run(call)
