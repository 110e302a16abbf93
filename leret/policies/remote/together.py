"""A policy at Together AI, through its official SDK."""

from __future__ import annotations

import asyncio
import json
import weakref
from typing import TYPE_CHECKING, Any

from leret.core.errors import MissingDependency
from leret.http.answers import Answer, ApiKey, HttpError, RejectedError, RetryableError, read_body
from leret.http.client import CONNECT_SHARE, Call
from leret.policies.remote.openai import OpenAIPolicy, check_token

if TYPE_CHECKING:
    from leret.config.policy import TogetherPolicySettings


class TogetherPolicy(OpenAIPolicy):
    """How it samples is `OpenAIPolicy`'s; the SDK carries the requests."""

    def __init__(self, settings: TogetherPolicySettings) -> None:
        self._sdk = _Sdk(ApiKey.from_env(settings.api_key_env, "policy.api_key_env"))
        super().__init__(settings, self._sdk.carry)

    async def check(self) -> None:
        await check_token(self, self.settings)

    async def aclose(self) -> None:
        await self._sdk.aclose()
        await super().aclose()


class _Sdk:
    """Calls of ``together.AsyncTogether``, whose own retries are off: the client's count for all."""

    def __init__(self, key: ApiKey) -> None:
        try:
            import together
            import together.resources.chat  # the SDK would import it during the first attempt, which has a deadline
        except ImportError as error:
            raise MissingDependency("together", "together") from error
        import httpx

        self._module: Any = together
        # The SDK lets through httpx's errors, in bodies that are read after the answer, and JSON's.
        self._failures = (together.TogetherError, TimeoutError, ConnectionError, httpx.HTTPError, ValueError)
        self._key = key
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )

    async def carry(self, call: Call, base: str, timeout_s: float) -> Answer:
        """Take a chat completion to the API."""
        try:
            return await asyncio.wait_for(self._answer(json.loads(call.body or b""), base, timeout_s), timeout_s)
        except self._module.APIStatusError as error:
            return Answer(base, error.status_code, error.response.headers, _body_of(error).encode())
        except self._failures as error:
            failure = self._failure(error, base, timeout_s)
        failure.__context__ = None  # the SDK's errors hold the request with its key
        raise failure

    async def aclose(self) -> None:
        """Close the running event loop's connections."""
        for connection in self._connections.pop(asyncio.get_running_loop(), {}).values():
            await connection.close()

    async def _answer(self, body: dict[str, Any], base: str, timeout_s: float) -> Answer:
        import httpx

        here = self._connections.setdefault(asyncio.get_running_loop(), {})
        if base not in here:
            here[base] = self._module.AsyncTogether(api_key=self._key.reveal(), base_url=base, max_retries=0)
        # The SDK's time-out is of each read; a server that trickles would never meet it.
        limits = httpx.Timeout(timeout_s, connect=CONNECT_SHARE * timeout_s)
        chat = here[base].chat.completions.with_streaming_response
        async with chat.create(**body, timeout=limits) as response:
            return Answer(base, response.status_code, response.headers, await read_body(response.iter_bytes(), base))

    def _failure(self, error: Exception, base: str, timeout_s: float) -> HttpError:
        sdk, cause = self._module, error.__cause__ or error
        if isinstance(error, sdk.APITimeoutError | TimeoutError) and type(cause).__name__ != "ConnectTimeout":
            return RetryableError(f"{base} did not answer within {timeout_s:.3g} s", "timeout")
        if isinstance(error, sdk.APIResponseValidationError | ValueError):
            return RetryableError(f"{base} sent what the SDK cannot read", "malformed")
        if isinstance(error, sdk.TogetherError) and not isinstance(error, sdk.APIConnectionError):
            return RejectedError(f"{base}: {type(error).__name__}: {error}")
        return RetryableError(f"{base} cannot be reached ({type(cause).__name__}: {cause})", "connection")


def _body_of(error: Any) -> str:
    try:
        return str(error.response.text)
    except Exception:  # httpx refuses the body of a stream that was not read
        return str(error)
