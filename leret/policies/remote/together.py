"""Together's official SDK, with its failures in our words."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from leret.core.errors import MissingDependency
from leret.core.types import digest
from leret.core.usage import UsageMeter
from leret.http.messages import body_of
from leret.http.secrets import Key
from leret.policies.base import Completion, Request
from leret.policies.remote.chat import Chat
from leret.policies.remote.dispatch import CONNECT_SHARE, Dispatcher
from leret.policies.remote.replies import RefusedError, TryAgainError, check_status, completions_of

Value = TypeVar("Value")

TOGETHER_URL = "https://api.together.ai/v1"


class TogetherApi:
    """Runs calls of ``together.AsyncTogether``, whose own retries are off: the dispatcher's count for all.

    Args:
        dispatcher: chooses the base URL, and tries again.
        key: of the account.

    Raises:
        MissingDependency: the SDK is not installed.
    """

    def __init__(self, dispatcher: Dispatcher, key: Key) -> None:
        try:
            import together
            import together.resources.chat  # the SDK would import it during the first attempt, which has a deadline
        except ImportError as error:
            raise MissingDependency("together", "together") from error
        self._sdk: Any = together
        self._dispatcher = dispatcher
        self._key = key
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )

    async def run(self, call: Callable[[Any, str, Any], Awaitable[Value]]) -> Value:
        """Make a call until it succeeds.

        Args:
            call: takes the SDK's client, its base URL and the attempt's time-outs.

        Raises:
            PolicyError: refused for good, or still failing after the last attempt.
        """
        clients = self._clients.setdefault(asyncio.get_running_loop(), {})

        async def send(url: str, timeout_s: float) -> Value:
            client = clients.get(url)
            if client is None:
                client = clients[url] = self._sdk.AsyncTogether(
                    api_key=self._key.reveal(), base_url=url, max_retries=0, timeout=self._dispatcher.timeout_s
                )
            return await self._once(call, client, url, timeout_s)

        return await self._dispatcher.run(send)

    async def aclose(self) -> None:
        """Close the running event loop's connections. May be called twice."""
        for client in self._clients.pop(asyncio.get_running_loop(), {}).values():
            await client.close()

    async def _once(
        self, call: Callable[[Any, str, Any], Awaitable[Value]], client: Any, url: str, timeout_s: float
    ) -> Value:
        import httpx

        sdk = self._sdk
        try:
            # The SDK's time-out is of each read; a server that trickles would never meet it.
            limits = httpx.Timeout(timeout_s, connect=CONNECT_SHARE * timeout_s)
            return await asyncio.wait_for(call(client, url, limits), timeout_s)
        except (TryAgainError, RefusedError) as error:
            error.args = (self._key.hide(str(error)),)
            failure: Exception = error
        # The SDK lets through httpx's errors, in bodies that are read after the answer, and JSON's.
        except (sdk.TogetherError, TimeoutError, ConnectionError, httpx.HTTPError, ValueError) as error:
            failure = self._in_our_words(error, url, timeout_s)
        # The SDK's errors hold the request, and what the server said of the key.
        failure.__context__ = None
        raise failure

    def _in_our_words(self, error: Exception, url: str, timeout_s: float) -> Exception:
        sdk, cause = self._sdk, error.__cause__ or error
        if isinstance(error, sdk.APIStatusError):
            told = self._key.hide(_said(error))
            try:
                check_status(error.status_code, error.response.headers, told, url)
            except (TryAgainError, RefusedError) as failure:
                return failure.with_traceback(None)
            return TryAgainError(f"{url} answered {error.status_code} out of turn", "garbled")
        if isinstance(error, sdk.APITimeoutError | TimeoutError) and type(cause).__name__ != "ConnectTimeout":
            return TryAgainError(f"{url} did not answer within {timeout_s:.3g} s", "timeout")
        if isinstance(error, sdk.APIResponseValidationError | ValueError):
            return TryAgainError(f"{url} sent what the SDK cannot read", "garbled")
        if isinstance(error, sdk.TogetherError) and not isinstance(error, sdk.APIConnectionError):
            return RefusedError(f"{url}: {type(error).__name__}: {self._key.hide(str(error))}")
        told = self._key.hide(f"{type(cause).__name__}: {cause}")
        return TryAgainError(f"{url} cannot be reached ({told})", "connection")


def _said(error: Any) -> str:
    """The body of an error's answer; its message where the body was not kept."""
    try:
        text = str(error.response.text)
    except Exception:  # httpx refuses the body of a stream that was not read
        text = ""
    return text or str(error)


pass


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
    def meter(self) -> UsageMeter:
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
