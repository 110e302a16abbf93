# ruff: noqa: D102  a method of a protocol has its text
"""A policy at Together AI, through its official SDK."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any

from leret.core.errors import MissingDependency
from leret.http.answers import MALFORMED, Answer, HttpError, RejectedError, RetryableError, one_line, read_body
from leret.http.client import CONNECT_SHARE, Client
from leret.policies.base import Completion, Request
from leret.policies.remote.openai import OpenAIPolicy, check_token, completions_of

if TYPE_CHECKING:
    from leret.config.policy import TogetherPolicySettings


class TogetherPolicy:
    """Implements ``Policy``; how it samples is `OpenAIPolicy`'s, and the SDK carries the requests.

    Args:
        settings: of kind together.

    Raises:
        MissingDependency: the SDK is not installed.
        ConfigError: the key's variable is not set.
    """

    def __init__(self, settings: TogetherPolicySettings) -> None:
        self.settings = settings
        self._chat = OpenAIPolicy(settings, self._send)
        self._sdk = _Sdk(self._chat.client)
        self.name, self.digest, self.meter = self._chat.name, self._chat.digest, self._chat.meter

    def __repr__(self) -> str:
        return f"TogetherPolicy({self.name!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> TogetherPolicy:
        return self  # DSPy's optimizers copy programs; the connections are one

    async def complete(self, request: Request) -> list[Completion]:
        return await self._chat.complete(request)

    async def check(self) -> None:
        await check_token(self, self.settings)

    async def aclose(self) -> None:
        await self._sdk.aclose()
        await self._chat.aclose()

    async def _send(self, body: dict[str, Any], n: int | None) -> list[Completion]:
        return await self._sdk.send(body, n)


class _Sdk:
    """Calls of ``together.AsyncTogether``, whose own retries are off: the client's count for all."""

    def __init__(self, client: Client) -> None:
        try:
            import together
            import together.resources.chat  # the SDK would import it during the first attempt, which has a deadline
        except ImportError as error:
            raise MissingDependency("together", "together") from error
        import httpx

        self._module: Any = together
        # The SDK lets through httpx's errors, in bodies that are read after the answer, and JSON's.
        self._failures = (together.TogetherError, TimeoutError, ConnectionError, httpx.HTTPError, ValueError)
        self._client = client
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )

    async def send(self, body: dict[str, Any], n: int | None) -> list[Completion]:
        """Carry a body."""

        async def once(url: str, timeout_s: float) -> list[Completion]:
            try:
                answer = await asyncio.wait_for(self._answer(url, body, timeout_s), timeout_s)
                try:
                    return completions_of(answer, n, body["max_tokens"])
                except MALFORMED as error:
                    raise answer.malformed(f"what cannot be read ({one_line(repr(error))})") from error
            except HttpError:
                raise
            except self._failures as error:
                failure = self._failure(error, url, timeout_s)
            failure.__context__ = None  # the SDK's errors hold the request with its key
            raise failure

        return await self._client.run(once)

    async def aclose(self) -> None:
        """Close the running event loop's connections."""
        for connection in self._connections.pop(asyncio.get_running_loop(), {}).values():
            await connection.close()

    async def _answer(self, url: str, body: dict[str, Any], timeout_s: float) -> Answer:
        import httpx

        here = self._connections.setdefault(asyncio.get_running_loop(), {})
        if url not in here:
            here[url] = self._module.AsyncTogether(api_key=self._client.key.reveal(), base_url=url, max_retries=0)
        # The SDK's time-out is of each read; a server that trickles would never meet it.
        limits = httpx.Timeout(timeout_s, connect=CONNECT_SHARE * timeout_s)
        chat = here[url].chat.completions.with_streaming_response
        async with chat.create(**body, timeout=limits) as response:
            told = await read_body(response.iter_bytes(), url)
        return Answer(url, response.status_code, response.headers, told)

    def _failure(self, error: Exception, url: str, timeout_s: float) -> Exception:
        sdk, cause = self._module, error.__cause__ or error
        if isinstance(error, sdk.APIStatusError):
            try:
                told = error.response.text
            except Exception:  # httpx refuses the body of a stream that was not read
                told = str(error)
            try:
                self._client.check(Answer(url, error.status_code, error.response.headers, told.encode()))
            except HttpError as failure:
                return failure.with_traceback(None)
        if isinstance(error, sdk.APITimeoutError | TimeoutError) and type(cause).__name__ != "ConnectTimeout":
            return RetryableError(f"{url} did not answer within {timeout_s:.3g} s", "timeout")
        if isinstance(error, sdk.APIResponseValidationError | ValueError):
            return RetryableError(f"{url} sent what the SDK cannot read", "malformed")
        if isinstance(error, sdk.TogetherError) and not isinstance(error, sdk.APIConnectionError):
            return RejectedError(f"{url}: {type(error).__name__}: {error}")
        return RetryableError(f"{url} cannot be reached ({type(cause).__name__}: {cause})", "connection")
