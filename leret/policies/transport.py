"""JSON requests to a set of equal servers, tried again while that may help."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from leret.errors import MissingDependency, PolicyError
from leret.policies.endpoints import Endpoint, Endpoints
from leret.policies.replies import RefusedError, TryAgainError, check_status

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Transport"]

Value = TypeVar("Value")

_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 20.0


@dataclass
class _Connection:
    """What belongs to one event loop."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore


class Transport:
    """Safe to use from several event loops; each keeps its own connections.

    Args:
        urls: base URLs; the least busy gets the next request.
        key: sent as a bearer token and nowhere else; None sends none.
        timeout_s: an attempt's deadline.
        concurrency: requests in flight, in each event loop.
        max_retries: attempts after the first.
    """

    def __init__(
        self, urls: Sequence[str], key: str | None, *, timeout_s: float, concurrency: int, max_retries: int
    ) -> None:
        self.endpoints = Endpoints(urls)
        self._key = key
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._max_retries = max_retries
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection] = (
            weakref.WeakKeyDictionary()
        )

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[str, str], Value]
    ) -> Value:
        """Send a request until it is answered.

        Args:
            method: of HTTP.
            path: after the base URL.
            body: sent as JSON; None sends none.
            read: takes (body, URL) of an answer; raises TryAgainError where it makes no sense.

        Raises:
            PolicyError: refused for good, or still failing after the last attempt.
        """
        connection = self._connection()
        for attempt in range(self._max_retries + 1):
            endpoint = self.endpoints.take()
            ok = False
            try:
                async with connection.slots:
                    value = await self._once(connection.session, endpoint, method, path, body, read)
                ok = True
                return value
            except RefusedError:
                ok = True  # the server is well; the request is not
                raise
            except TryAgainError as failure:
                ok = not failure.blame
                if attempt == self._max_retries:
                    raise PolicyError(
                        f"{failure}; gave up after {attempt + 1} attempts; see that the server is up, then run again"
                    ).failed() from failure
                wait_s = failure.wait_s if failure.wait_s is not None else _backoff_s(attempt)
            finally:
                self.endpoints.give_back(endpoint, ok)
            await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    async def aclose(self) -> None:
        """Close the running event loop's connections. May be called twice."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.session.close()

    async def _once(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        read: Callable[[str, str], Value],
    ) -> Value:
        import aiohttp

        url = f"{endpoint.url}{path}"
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        try:
            async with session.request(method, url, json=body, headers=headers) as answer:
                text = await answer.text(errors="replace")
                check_status(answer.status, answer.headers, text, url)
                return read(text, url)
        except aiohttp.InvalidURL as error:
            raise RefusedError(f"{endpoint.url} is no URL; write policy.urls as in http://127.0.0.1:8000/v1") from error
        except TimeoutError as error:
            raise TryAgainError(f"{url} did not answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise TryAgainError(f"{url} cannot be reached ({type(error).__name__}: {error})") from error

    def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = self._connections.get(loop)
        if connection is None:
            try:
                import aiohttp
            except ImportError as error:
                raise MissingDependency("aiohttp", "serve") from error
            session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                connector=aiohttp.TCPConnector(limit=self._concurrency),
            )
            connection = self._connections[loop] = _Connection(session, asyncio.Semaphore(self._concurrency))
        return connection


def _backoff_s(attempt: int) -> float:
    """Doubling, with jitter so that many waiters do not come back together."""
    return min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2.0**attempt) * random.uniform(0.5, 1.5)
