"""The queue before an engine: what it tells those for whom there is no room."""

from __future__ import annotations

import asyncio

import pytest

from leret.retrieval.server.batching import BatchQueue, FullError
from tests.retrieval.serving import Echo


def test_the_wait_told_is_that_of_the_queue_from_the_first_search_on() -> None:
    engine = Echo()

    async def told() -> float:
        queue = BatchQueue(engine, 8, 8, lambda n, seconds: None)
        engine.go.clear()
        first = asyncio.create_task(queue.search(["half a second"], 1))
        await asyncio.sleep(0.5)
        engine.go.set()
        await first
        engine.go.clear()
        searched = asyncio.create_task(queue.search(["a"], 1))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(queue.search(["b"] * 8, 1))
        await asyncio.sleep(0.05)
        with pytest.raises(FullError) as full:
            await queue.search(["c"], 1)
        engine.go.set()
        await asyncio.gather(searched, waiting)
        queue.close()
        return full.value.wait_s

    assert asyncio.run(told()) >= 4  # 8 queries of half a second
