"""Dynamic batching for the sampler and the server: concurrent searches share one call."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from leret.core.errors import RetrievalError
from leret.core.types import Ranking
from leret.retrieval.base import PartialResultsError, Retriever

# below this CPU time per query, a thread costs more time than it saves (RESULTS-archive.md)
_QUICK_S = 0.0005
_N_RECENT = 20_000  # maximum number of rankings in memory (fast searches only)


class QueueFullError(Exception):
    """The queue is full. The client may retry after ``wait_s`` seconds."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"the queue is full; try again in {wait_s:g} s")
        self.wait_s = wait_s


@dataclass(eq=False, slots=True)
class _Request:
    queries: Sequence[str]
    k: int
    future: asyncio.Future[list[Ranking]]


class SearchBatcher:
    """Awaitable searches on one event loop.

    Searches that arrive during a batch wait for the next batch. So batches grow with the load, and
    no search waits for a batch to fill. A batch contains queries with the same k; duplicate queries
    are searched once.

    Args:
        retriever: called with one batch at a time, in a separate thread.
        max_batch: maximum number of queries per batch. A single larger request is searched as one
            batch.
        max_waiting: maximum number of queries in the queue. A request that does not fit is refused
            as a whole.
        on_batch: called after each batch with the number of queries and the duration of the search
            in seconds.
    """

    def __init__(
        self,
        retriever: Retriever,
        max_batch: int = 1024,
        max_waiting: float = math.inf,
        on_batch: Callable[[int, float], None] | None = None,
    ) -> None:
        self.retriever = retriever
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._on_batch = on_batch
        self._waiting: deque[_Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leret-search")
        self._only_computes = getattr(retriever, "only_computes", False)
        self._recent: dict[tuple[str, int], Ranking] = {}
        # CPU seconds per query in the last batch; `search_now` makes it a moving average
        self._cpu_s = math.inf
        self._wall_s: float | None = None  # seconds per query, moving average
        self._counts = {"asked": 0, "searched": 0, "batches": 0}
        self.n_waiting = 0  # queries in the queue

    async def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        if not queries:
            return []
        if self.n_waiting + len(queries) > self._max_waiting:
            wait_s = round(self.n_waiting * (self._wall_s or 0.0))
            raise QueueFullError(min(30.0, max(1.0, wait_s)))
        request = _Request(queries, k, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self.n_waiting += len(queries)
        self._counts["asked"] += len(queries)
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        try:
            return await request.future
        except asyncio.CancelledError:
            if request in self._waiting:
                self._waiting.remove(request)
                self.n_waiting -= len(queries)
            raise

    def search_now(self, query: str, k: int) -> Ranking | None:
        """Search at once in the calling thread.

        Return None if the retriever does I/O or is not known to be fast.
        """
        if not self._only_computes or self._cpu_s > _QUICK_S:
            return None
        self._counts["asked"] += 1
        recent = self._recent.get((query, k))  # samples from one state often have the same query
        if recent is not None:
            return recent
        self._counts["searched"] += 1
        # time.thread_time() is a system call: a tenth of the time of a search
        began = time.perf_counter()
        [ranking] = self.retriever.search((query,), k)
        seconds = time.perf_counter() - began
        self._cpu_s += 0.1 * (seconds - self._cpu_s)  # a slow search changes the average little
        if len(self._recent) >= _N_RECENT:
            self._recent.clear()
        self._recent[query, k] = ranking
        return ranking

    def counts(self) -> dict[str, int]:
        """Return the numbers of queries ``asked`` and ``searched``, and of ``batches``.

        Duplicate queries are searched once.
        """
        return dict(self._counts)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)  # let all ready tasks add their queries first
                await self._answer(self._next_batch())
        finally:
            self._task = None

    def _next_batch(self) -> list[_Request]:
        """Take the first request, and later requests with the same k that fit into the batch.

        The remaining requests keep their order.
        """
        batch: list[_Request] = []
        later: deque[_Request] = deque()
        n = 0
        while self._waiting and n < self._max_batch:
            request = self._waiting.popleft()
            fits = n + len(request.queries) <= self._max_batch
            if not batch or (fits and request.k == batch[0].k):
                batch.append(request)
                n += len(request.queries)
            else:
                later.append(request)
        self._waiting.extendleft(reversed(later))
        self.n_waiting -= n
        return batch

    async def _answer(self, batch: list[_Request]) -> None:
        if not batch:  # all requests were cancelled
            return
        distinct: dict[str, None] = {}
        for request in batch:
            distinct.update(dict.fromkeys(request.queries))
        queries = list(distinct)
        began = time.monotonic()
        error: Exception | None = None
        try:
            rankings = dict(zip(queries, await self._search(queries, batch[0].k), strict=True))
        except Exception as failure:  # re-raised in the tasks that await the search
            error = failure
            rankings = failure.answered if isinstance(failure, PartialResultsError) else {}
        seconds = time.monotonic() - began
        for request in batch:
            if request.future.done():
                continue
            if error is None or all(query in rankings for query in request.queries):
                request.future.set_result([rankings[query] for query in request.queries])
            else:
                request.future.set_exception(error)
                # mark as retrieved: no asyncio warning if the caller was cancelled
                request.future.exception()
        if error is None:
            per_query = seconds / len(queries)
            if self._wall_s is None:
                self._wall_s = per_query
            else:
                self._wall_s = 0.8 * self._wall_s + 0.2 * per_query
            if self._on_batch is not None:
                self._on_batch(len(queries), seconds)

    async def _search(self, queries: list[str], k: int) -> list[Ranking]:
        self._counts["batches"] += 1
        self._counts["searched"] += len(queries)
        rankings = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._timed, queries, k
        )
        if len(rankings) != len(queries):
            raise RetrievalError(
                f"the engine returned {len(rankings)} rankings for {len(queries)} queries"
            ).failed()
        return rankings

    def _timed(self, queries: list[str], k: int) -> list[Ranking]:
        began = time.thread_time()
        rankings = self.retriever.search(queries, k)
        self._cpu_s = (time.thread_time() - began) / len(queries)
        return rankings
