"""Together's official SDK, with its failures in our words."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from leret.errors import MissingDependency
from leret.policies.dispatch import CONNECT_SHARE, Dispatcher
from leret.policies.keys import Key
from leret.policies.replies import RefusedError, TryAgainError, check_status

__all__ = ["TOGETHER_URL", "TogetherApi"]

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
