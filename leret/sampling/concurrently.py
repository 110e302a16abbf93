"""Many small tasks on one event loop, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

__all__ = ["each"]

T = TypeVar("T")


async def each(items: Iterable[T], do: Callable[[T], Awaitable[None]], concurrency: int) -> None:
    """Await ``do(item)`` for every item, with no barrier between items.

    Args:
        items: taken one by one, as earlier ones end.
        do: what it raises ends the whole: the others are cancelled and waited for.
        concurrency: items in flight, at least 1.
    """
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await do(item)

    tasks = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
