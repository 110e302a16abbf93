"""The queue before an engine: bounded, and emptied in batches that many clients share."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from leret.core.errors import RetrievalError
from leret.core.types import Ranking
from leret.retrieval.base import Retriever


class FullError(Exception):
    """The queue has no room; nothing is wrong with the request.

    Args:
        wait_s: when there should be room again.
    """

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"the queue is full; try again in {wait_s:g} s")
        self.wait_s = wait_s


@dataclass(eq=False)
class _Entry:
    queries: Sequence[str]
    k: int
    future: asyncio.Future[list[Ranking]]


class BatchQueue:
    """Awaitable searches on one event loop; the engine runs in one thread of its own.

    What arrives while a batch is searched for waits for the next one, so batches grow with the load and nobody waits
    for a batch to fill. Only queries with the same k are searched together.

    Args:
        retriever: called with one batch at a time.
        max_queries: waiting at most; a request that does not fit is refused whole.
        max_batch: queries of a batch, but for a single request with more.
        on_batch: hears the size of each batch and its seconds.
    """

    def __init__(
        self, retriever: Retriever, max_queries: int, max_batch: int, on_batch: Callable[[int, float], None]
    ) -> None:
        self._retriever = retriever
        self._max_queries = max_queries
        self._max_batch = max_batch
        self._on_batch = on_batch
        self._waiting: deque[_Entry] = deque()
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leret-search")
        self._search: Future[list[Ranking]] | None = None
        self._query_s: float | None = None
        self.n_waiting = 0
        """Queries in the queue."""

    async def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """One ranking a query, in their order.

        Raises:
            FullError: there is no room.
            RetrievalError: the engine could not answer the batch.
            CancelledError: whoever asked is gone; queries that still waited are not searched for.
        """
        if not queries:
            return []
        if self.n_waiting + len(queries) > self._max_queries:
            raise FullError(min(30.0, max(1.0, round(self.n_waiting * (self._query_s or 0.0)))))
        entry = _Entry(queries, k, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self.n_waiting += len(queries)
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        try:
            return await entry.future
        except asyncio.CancelledError:
            self._forget(entry)
            raise

    @property
    def is_searching(self) -> bool:
        """Whether the engine is at work."""
        return self._search is not None and not self._search.done()

    def close(self) -> None:
        """End the thread when its batch is done."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        try:
            await asyncio.sleep(0)  # let all requests that are read already be in
            while self._waiting:
                await self._answer(self._batch())
                await asyncio.sleep(0)
        finally:
            self._task = None

    def _batch(self) -> list[_Entry]:
        """The next entries with the k of the first; entries with another k keep their places."""
        k = self._waiting[0].k
        batch: list[_Entry] = []
        later: deque[_Entry] = deque()
        n = 0
        while self._waiting:
            entry = self._waiting.popleft()
            if entry.k == k and (not batch or n + len(entry.queries) <= self._max_batch):
                batch.append(entry)
                n += len(entry.queries)
            else:
                later.append(entry)
        self._waiting = later
        self.n_waiting -= n
        return batch

    def _forget(self, entry: _Entry) -> None:
        """Give up the places of an entry that nobody waits for any more."""
        if entry in self._waiting:
            self._waiting.remove(entry)
            self.n_waiting -= len(entry.queries)

    async def _answer(self, batch: list[_Entry]) -> None:
        loop = asyncio.get_running_loop()
        queries = [query for entry in batch for query in entry.queries]
        began = loop.time()
        try:
            self._search = self._thread.submit(self._retriever.search, queries, batch[0].k)
            rankings = await asyncio.wrap_future(self._search)
            if len(rankings) != len(queries):
                raise RetrievalError(f"the engine sent {len(rankings)} rankings for {len(queries)} queries").failed()
        except Exception as error:  # handed to whoever waits
            for entry in batch:
                if not entry.future.done():
                    entry.future.set_exception(error)
            return
        seconds = loop.time() - began
        a_query = seconds / len(queries)
        self._query_s = a_query if self._query_s is None else 0.8 * self._query_s + 0.2 * a_query
        self._on_batch(len(queries), seconds)
        start = 0
        for entry in batch:
            if not entry.future.done():
                entry.future.set_result(rankings[start : start + len(entry.queries)])
            start += len(entry.queries)
