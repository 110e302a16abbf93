"""A thread that batches waiting requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from leret.core.errors import LeretError, PolicyError

Item = TypeVar("Item")
Result = TypeVar("Result")

_LINGER_S = 0.002


class BatchWorker(Generic[Item, Result]):
    """Processes items from many threads in batches, in one thread.

    ``plan`` divides the waiting items into batches of indices. ``process`` returns a result or an
    exception per item. ``start`` is called once, when the thread starts.
    """

    def __init__(
        self,
        process: Callable[[Sequence[Item]], Sequence[Result | Exception]],
        plan: Callable[[Sequence[Item]], Sequence[Sequence[int]]],
        *,
        name: str,
        start: Callable[[], None] | None = None,
    ) -> None:
        self._process = process
        self._plan = plan
        self._name = name
        self._start = start
        self._queue: queue.SimpleQueue[list[tuple[Item, Future[Result]]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.closed = False
        self.n_batches = 0

    def submit(self, items: Sequence[Item]) -> list[Future[Result]]:
        """Queue items; one call of ``plan`` receives all of them.

        Raise `PolicyError` if the worker is closed.
        """
        futures = [Future[Result]() for _ in items]
        with self._lock:
            if self.closed:
                raise PolicyError(f"{self._name} is closed; load the policy again")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(list(zip(items, futures, strict=True)))
        return futures

    def close(self) -> None:
        """Finish the queued items, then stop the thread.

        May be called twice, and from any thread.
        """
        with self._lock:
            self.closed = True
            thread = self._thread
            self._thread = None
            if thread is not None:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        if self._start is not None:
            self._start()
        going = True
        while going:
            waiting, going = self._take()
            live = [
                (item, future) for item, future in waiting if future.set_running_or_notify_cancel()
            ]
            if live:
                self._serve(live)

    def _take(self) -> tuple[list[tuple[Item, Future[Result]]], bool]:
        """Wait for items.

        Return all queued items, and False if `close` was called, True otherwise.
        """
        waiting: list[tuple[Item, Future[Result]]] = []
        timeout: float | None = None
        while True:
            try:
                items = self._queue.get(timeout=timeout)
            except queue.Empty:
                return waiting, True
            if items is None:
                return waiting, False
            waiting += items
            # Callers whose requests finished in one batch soon send their next ones: wait
            # briefly to batch them, too.
            timeout = _LINGER_S

    def _serve(self, live: list[tuple[Item, Future[Result]]]) -> None:
        for batch in self._plan([item for item, _ in live]):
            entries = [live[index] for index in batch]
            self.n_batches += 1
            try:
                results = self._process([item for item, _ in entries])
            except Exception as error:
                results = [_as_policy_error(error)] * len(entries)
            for (_, future), result in zip(entries, results, strict=True):
                if isinstance(result, Exception):
                    future.set_exception(_as_policy_error(result))
                else:
                    future.set_result(result)


def _as_policy_error(error: Exception) -> LeretError:
    if isinstance(error, LeretError):
        return error
    wrapped = PolicyError(f"the model failed on this batch ({type(error).__name__}: {error})")
    wrapped.__cause__ = error
    return wrapped
