"""A request's way to an answer: an endpoint with room, a deadline, and further attempts while they may help."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from leret.core.errors import PolicyError
from leret.core.usage import UsageMeter
from leret.policies.remote.endpoints import Endpoint, Endpoints
from leret.policies.remote.replies import RefusedError, TryAgainError

Value = TypeVar("Value")

CONNECT_SHARE = 0.4
"""Of an attempt's time, for connecting: a server that does not accept is away, one that is late to answer is slow."""

_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 20.0


class Dispatcher:
    """Whatever the wire and the protocol are. Safe to use from several event loops, each with limits of its own.

    Args:
        urls: base URLs of equal servers.
        timeout_s: an attempt's deadline.
        deadline_s: a request's, from its first attempt on: all attempts and the waits between them.
        concurrency: requests in flight at most, in each event loop.
        max_retries: attempts after the first.
        price_prompt: of a million prompt tokens.
        price_completion: of a million completion tokens.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 60.0,
        deadline_s: float = 600.0,
        concurrency: int = 32,
        max_retries: int = 6,
        price_prompt: float = 0.0,
        price_completion: float = 0.0,
    ) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.meter = UsageMeter(price_prompt, price_completion)
        self.meter.watch(self._gauges)
        self.timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._concurrency = concurrency
        self._max_retries = max_retries
        self._endpoints: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoints] = weakref.WeakKeyDictionary()

    async def run(self, send: Callable[[str, float], Awaitable[Value]]) -> Value:
        """Send a request until it is answered.

        Args:
            send: takes a base URL and the attempt's deadline in seconds; raises TryAgainError or RefusedError.

        Raises:
            PolicyError: refused for good, or still failing after the last attempt or at the deadline.
        """
        endpoints = self._of_this_loop()
        clock = endpoints.clock
        endpoint = endpoints.take() or await endpoints.wait()
        last = clock() + self._deadline_s
        attempt = 1
        while True:
            began = clock()
            try:
                value = await send(endpoint.url, min(self.timeout_s, last - began))
            except TryAgainError as failure:
                self.meter.fault(failure.kind)
                endpoints.failed(endpoint, began, failure.kind, failure.wait_s, failure.blame)
                # A Retry-After closes the endpoint for all: waiting for an endpoint is waiting for it.
                wait_s = _backoff_s(attempt) if failure.wait_s is None else 0.0
                if attempt > self._max_retries or clock() + wait_s >= last:
                    raise _given_up(failure, attempt) from failure
                again = await self._another(endpoints, wait_s, last)
                if again is None:
                    raise _given_up(failure, attempt) from failure
                self.meter.retried()
                endpoint, attempt = again, attempt + 1
            except RefusedError:
                self.meter.fault("refused")
                endpoints.answered(endpoint, began)  # the server is well; the request is not
                raise
            except BaseException:
                endpoints.release(endpoint)
                raise
            else:
                self.meter.answered(endpoints.answered(endpoint, began))
                return value

    async def _another(self, endpoints: Endpoints, wait_s: float, last: float) -> Endpoint | None:
        """An endpoint for the next attempt; None where the deadline comes first."""
        if wait_s:
            await asyncio.sleep(wait_s)
        endpoint = endpoints.take()
        if endpoint is not None:
            return endpoint
        try:
            return await asyncio.wait_for(endpoints.wait(), last - endpoints.clock())
        except TimeoutError:
            return None

    def _of_this_loop(self) -> Endpoints:
        loop = asyncio.get_running_loop()
        endpoints = self._endpoints.get(loop)
        if endpoints is None:
            endpoints = self._endpoints[loop] = Endpoints(self.urls, self._concurrency)
        return endpoints

    def _gauges(self) -> dict[str, float]:
        known = list(self._endpoints.values())
        limits = [sum(int(endpoint.limit.value) for endpoint in endpoints.all) for endpoints in known]
        return {
            "concurrency": float(sum(min(limit, self._concurrency) for limit in limits)),
            "in_flight": float(sum(endpoints.n_in_flight for endpoints in known)),
        }


def _given_up(failure: TryAgainError, attempts: int) -> PolicyError:
    times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return PolicyError(f"{failure}; gave up after {times}; see that the server is up, then run again").failed()


def _backoff_s(attempt: int) -> float:
    """Doubling, with jitter so that many waiters do not come back together."""
    return min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.5)
