"""A background event loop for synchronous callers (`search`, an LM of DSPy), tasks, and muted output."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_log_lock = threading.RLock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the background loop; cancelling the future cancels it."""
    global _running  # noqa: PLW0603  one loop a process is the point
    with _lock:
        if _running is None or _running[0] != os.getpid():  # a forked child does not inherit the thread
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="leret-background", daemon=True).start()
            _running = os.getpid(), loop
        return asyncio.run_coroutine_threadsafe(work, _running[1])


def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that logs no warning if its error is never read, because another error ended the session."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def for_each(items: Iterable[T], do: Callable[[T], Awaitable[None]], concurrency: int) -> None:
    """Await ``do(item)`` for every item, at most ``concurrency`` at a time."""
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await do(item)

    await gathered(work() for _ in range(concurrency))


async def gathered(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first error, or a cancellation, cancels all others and waits for them."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class _MutedStream(io.TextIOBase):
    """A stream that drops the output of muted threads; a live progress display writes from another thread."""

    stream: TextIO

    def write(self, text: str) -> int:
        if threading.get_ident() in _muted or (_muted and type(threading.current_thread()).__name__ == "TMonitor"):
            return len(text)  # tqdm's monitor redraws the bars of such threads
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()


_muted: dict[int, int] = {}  # number of `muted` blocks around each muted thread
# Kept for ever: a ``print`` in another thread holds no reference to its stream.
_streams = {"stdout": _MutedStream(), "stderr": _MutedStream()}


class muted:  # noqa: N801 - a context manager; a generator takes 1.5 times as long
    """Drop the output of threads, by default of this one, in the block. Blocks of several threads may overlap."""

    def __init__(self, threads: Collection[int] | None = None) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        with _lock:
            for name, stream in _streams.items():
                if (before := getattr(sys, name)) is not stream:
                    stream.stream = before
                    setattr(sys, name, stream)
            for thread in [threading.get_ident()] if self._threads is None else self._threads:
                _muted[thread] = _muted.get(thread, 0) + 1

    def __exit__(self, *error: object) -> None:
        with _lock:
            for thread in [threading.get_ident()] if self._threads is None else self._threads:
                _muted[thread] -= 1
                if not _muted[thread]:
                    del _muted[thread]
            for name, stream in _streams.items():
                if not _muted and getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)


@contextmanager
def suppress_output(logger: str) -> Iterator[None]:
    """Drop the output of this thread and the log of one library in the block; other threads wait for their turn."""
    log = logging.getLogger(logger)
    with _log_lock:  # the log level is global: each thread restores it
        level = log.level
        log.setLevel(logging.CRITICAL + 1)
        try:
            with muted():
                yield
        finally:
            log.setLevel(level)
