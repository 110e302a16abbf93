"""JSON over HTTP, with a connection pool for each event loop."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from leret.http.messages import MALFORMED, body_of, short
from leret.http.secrets import Key
from leret.policies.remote.dispatch import CONNECT_SHARE, Dispatcher
from leret.policies.remote.replies import RefusedError, TryAgainError, check_status

if TYPE_CHECKING:
    import aiohttp


Value = TypeVar("Value")
Read = Callable[[bytes, str, Mapping[str, str]], Value]
"""Takes an answer's body, its URL and its headers; raises TryAgainError where they make no sense."""


# json.dumps would build an encoder at every call.
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Transport:
    """Safe to use from several event loops; each keeps its own connections.

    Args:
        dispatcher: chooses servers, and tries again.
        key: sent as a bearer token and nowhere else.
        retried: HTTP status codes that are worth another attempt, beside the usual ones.
    """

    def __init__(self, dispatcher: Dispatcher, key: Key, retried: frozenset[int] = frozenset()) -> None:
        self.dispatcher = dispatcher
        self._key = key
        self._retried = retried
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            weakref.WeakKeyDictionary()
        )

    async def post(
        self,
        path: str | Callable[[str], str],
        body: dict[str, Any],
        read: Read[Value],
        moved: Callable[[str, int], bool] | None = None,
    ) -> Value:
        """Send a request until it is answered.

        Args:
            path: after the base URL; where servers differ, a function of it.
            body: sent as JSON.
            read: of the answer.
            moved: takes a base URL and the status of a refusal; True where ``path`` now gives another one to try.

        Raises:
            PolicyError: refused for good, or still failing after the last attempt.
        """
        return await self._call("POST", path, _encode(body).encode(), read, moved)

    async def get(self, path: str, read: Read[Value]) -> Value:
        """As `post`, without a body."""
        return await self._call("GET", path, None, read)

    async def aclose(self) -> None:
        """Close the running event loop's connections. May be called twice."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def _call(
        self,
        method: str,
        path: str | Callable[[str], str],
        body: bytes | None,
        read: Read[Value],
        moved: Callable[[str, int], bool] | None = None,
    ) -> Value:
        session = self._session()

        async def send(base: str, timeout_s: float) -> Value:
            try:
                url = base + (path if isinstance(path, str) else path(base))
                return await self._once(session, method, url, body, read, timeout_s)
            except RefusedError as refusal:
                if callable(path) and moved is not None and moved(base, refusal.status):
                    return await self._once(session, method, base + path(base), body, read, timeout_s)
                raise

        return await self.dispatcher.run(send)

    async def _once(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        body: bytes | None,
        read: Read[Value],
        timeout_s: float,
    ) -> Value:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=max(0.001, timeout_s), sock_connect=CONNECT_SHARE * timeout_s)
        try:
            async with session.request(method, url, data=body, allow_redirects=False, timeout=timeout) as answer:
                told = await body_of(answer.content.iter_any())
                if answer.status != 200:
                    check_status(answer.status, answer.headers, self._key.hide(told), url, self._retried)
                return read(told, url, answer.headers)
        except aiohttp.InvalidURL as error:
            raise RefusedError(f"{url} is no URL; write policy.urls as in http://127.0.0.1:8000/v1") from error
        except (TryAgainError, RefusedError) as failure:
            failure.args = (self._key.hide(str(failure)),)
            raise
        except (aiohttp.ClientError, ConnectionError) as error:
            told_by = f"{type(error).__name__}: {error}"
            raise TryAgainError(f"{url} cannot be reached ({self._key.hide(told_by)})", "connection") from error
        except TimeoutError as error:
            raise TryAgainError(f"{url} did not answer within {timeout_s:.3g} s", "timeout") from error
        except MALFORMED as error:
            told_by = self._key.hide(short(repr(error)))
            raise TryAgainError(f"{url} sent what cannot be read ({told_by})", "garbled") from error

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            import aiohttp

            session = self._sessions[loop] = aiohttp.ClientSession(
                headers={"Content-Type": "application/json", **self._key.headers()},
                connector=aiohttp.TCPConnector(limit=0),  # the dispatcher counts
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return session
