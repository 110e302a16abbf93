"""One retriever for many tasks: what is asked at the same time is asked in one batch."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor

from leret.core.types import Ranking
from leret.retrieval.base import PartlyAnsweredError, Retriever

_QUICK_S = 0.0005
"""CPU-seconds a query below which a thread costs more than it frees."""


class SearchFront:
    """Awaitable searches on one event loop.

    Searches that arrive while a batch is being answered wait for the next one, so the batches grow with the load.
    A (query, k) in flight is asked once, however many wait for it; recent answers are kept.

    A retriever that says ``only_computes`` is called on the event loop itself for as long as its searches are quick:
    to hand them to a thread and back takes longer (benchmarks/RESULTS.md).

    Args:
        retriever: called one batch at a time, in a thread of its own unless it is quick.
        max_batch: queries a batch.
        max_entries: answers kept.
    """

    def __init__(self, retriever: Retriever, max_batch: int = 1024, max_entries: int = 20_000) -> None:
        self.retriever = retriever
        self._max_batch = max_batch
        self._max_entries = max_entries
        self._answers: OrderedDict[tuple[str, int], Ranking] = OrderedDict()
        self._waiting: dict[tuple[str, int], asyncio.Future[Ranking]] = {}
        self._asked: dict[tuple[str, int], asyncio.Future[Ranking]] = {}
        self._drain_task: asyncio.Task[None] | None = None
        self._only_computes = getattr(retriever, "only_computes", False)
        self._query_s = math.inf  # of the last batch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leret-search")
        self._counts = {"asked": 0, "searched": 0, "batches": 0}

    async def search(self, query: str, k: int) -> Ranking:
        """The retriever's answer.

        Raises:
            RetrievalError: the retriever could not answer the batch that this query was in.
        """
        key = (query, k)
        self._counts["asked"] += 1
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
            return answer
        future = self._asked.get(key) or self._waiting.get(key)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._waiting[key] = future
            if self._drain_task is None:
                self._drain_task = asyncio.create_task(self._drain())
        return await asyncio.shield(future)  # one waiter's cancellation must not take the answer from the others

    def counts(self) -> dict[str, int]:
        """Queries ``asked`` for, those of them ``searched`` (the others were known, or on their way), ``batches``."""
        return dict(self._counts)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _drain(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)  # let all tasks that are ready ask first
                keys = list(self._waiting)[: self._max_batch]
                self._asked = {key: self._waiting.pop(key) for key in keys}
                by_k: dict[int, list[str]] = defaultdict(list)
                for query, k in keys:
                    by_k[k].append(query)
                for k, queries in by_k.items():
                    await self._answer(queries, k)
                self._asked = {}
        finally:
            self._drain_task = None

    async def _answer(self, queries: list[str], k: int) -> None:
        self._counts["batches"] += 1
        self._counts["searched"] += len(queries)
        try:
            if self._only_computes and self._query_s < _QUICK_S:
                rankings = self._search(queries, k)
            else:
                rankings = await asyncio.get_running_loop().run_in_executor(self._thread, self._search, queries, k)
        except Exception as error:  # handed to whoever waits, who decides
            answered = error.answered if isinstance(error, PartlyAnsweredError) else {}
            for query in queries:
                future = self._asked[query, k]
                if query in answered:
                    if not future.done():
                        future.set_result(answered[query])
                elif not future.done():
                    future.set_exception(error)
                    future.exception()  # read, so that a question that was cancelled meanwhile leaves no warning
            return
        for query, ranking in zip(queries, rankings, strict=True):
            self._answers[query, k] = ranking
            if not self._asked[query, k].done():
                self._asked[query, k].set_result(ranking)
        while len(self._answers) > self._max_entries:
            self._answers.popitem(last=False)

    def _search(self, queries: list[str], k: int) -> list[Ranking]:
        began = time.thread_time()
        rankings = self.retriever.search(queries, k)
        self._query_s = (time.thread_time() - began) / len(queries)
        return rankings
