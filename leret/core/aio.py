"""One event loop in a thread of its own, for callers that wait: `search` and an LM of DSPy are ordinary calls."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, TypeVar, cast

T = TypeVar("T")

_lock = threading.Lock()
_output_lock = threading.RLock()
_recent: deque[_MutedStream] = deque(maxlen=32)
"""Not dropped at once: a ``print`` of another thread may still write to one, and holds no reference to it."""
_running: tuple[int, asyncio.AbstractEventLoop] | None = None


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the background loop; cancelling its future cancels it."""
    global _running  # noqa: PLW0603  one loop a process is the point
    with _lock:
        if _running is None or _running[0] != os.getpid():  # a forked child does not inherit the thread
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="leret-background", daemon=True).start()
            _running = os.getpid(), loop
        return asyncio.run_coroutine_threadsafe(work, _running[1])


def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose error is read, so that it leaves no warning where another one's error ends the session."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def for_each(items: Iterable[T], do: Callable[[T], Awaitable[None]], concurrency: int) -> None:
    """Await ``do(item)`` for every item, with no barrier between items."""
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await do(item)

    await gathered(work() for _ in range(concurrency))


async def gathered(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in their order; what one raises, or a cancellation, ends the whole: the others are waited for."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class _MutedStream(io.TextIOBase):
    """Swallows what these threads write; a live progress display, in its own thread, still gets through."""

    def __init__(self, stream: TextIO, threads: set[int]) -> None:
        super().__init__()
        self._stream, self._threads = stream, threads

    def write(self, text: str) -> int:
        if threading.get_ident() in self._threads or type(threading.current_thread()).__name__ == "TMonitor":
            return len(text)  # tqdm's monitor redraws the bars of such threads
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


class Muted:
    """Drops what this thread prints and logs within the block; one may be entered again and again, by one thread."""

    def __init__(self) -> None:
        self._before: tuple[TextIO, ...] = ()
        self._streams: list[TextIO] = []  # kept, as `_recent` is

    def __enter__(self) -> None:
        if (sys.stdout, sys.stderr) != self._before:
            self._before, own = (sys.stdout, sys.stderr), {threading.get_ident()}
            self._streams = [cast(TextIO, _MutedStream(stream, own)) for stream in self._before]
        sys.stdout, sys.stderr = self._streams

    def __exit__(self, *error: object) -> None:
        sys.stdout, sys.stderr = self._before


@contextmanager
def suppress_output(logger: str) -> Iterator[None]:
    """Drop what this thread prints, and the log lines of one library; of several threads, one after the other."""
    threads = {threading.get_ident()}
    log = logging.getLogger(logger)
    with _output_lock:  # streams and level are the process's: each finds them as they were
        level = log.level
        log.setLevel(logging.CRITICAL + 1)
        _recent.extend(_MutedStream(stream, threads) for stream in (sys.stdout, sys.stderr))
        try:
            with redirect_stdout(_recent[-2]), redirect_stderr(_recent[-1]):
                yield
        finally:
            log.setLevel(level)


@contextmanager
def suppress_threads(prefix: str) -> Iterator[None]:
    """Drop what a library's own threads print on standard output."""
    threads = {thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith(prefix)}
    with redirect_stdout(_MutedStream(sys.stdout, threads)):
        yield
