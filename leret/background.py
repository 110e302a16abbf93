"""One event loop in a thread of its own, for callers that wait: `search` and an LM of DSPy are ordinary calls."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["submit"]

T = TypeVar("T")

_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the background loop.

    Returns:
        Its future; cancelling it cancels the coroutine.
    """
    return asyncio.run_coroutine_threadsafe(work, _loop())


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process; a forked child does not inherit the thread, so it starts its own."""
    global _running  # noqa: PLW0603  one loop a process is the point
    with _lock:
        if _running is None or _running[0] != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="leret-background", daemon=True).start()
            _running = os.getpid(), loop
        return _running[1]
