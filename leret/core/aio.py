"""Asyncio helpers, and a background event loop for synchronous callers (`leret.search`, DSPy LMs)."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the background loop. Cancelling the future cancels the coroutine."""
    global _running  # noqa: PLW0603  one loop per process is intended
    with _lock:
        # a forked child does not inherit the thread
        if _running is None or _running[0] != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="leret-background", daemon=True).start()
            _running = os.getpid(), loop
        return asyncio.run_coroutine_threadsafe(work, _running[1])


def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task. If it fails and is never awaited, asyncio does not log "exception was never retrieved"."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def for_each(
    items: Iterable[T], do: Callable[[T], Awaitable[None]], concurrency: int
) -> None:
    """Await ``do(item)`` for every item, at most ``concurrency`` at a time."""
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await do(item)

    await gathered(work() for _ in range(concurrency))


async def gathered(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the coroutines' results in order. On an error or a cancellation, cancel all tasks and wait for them."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
