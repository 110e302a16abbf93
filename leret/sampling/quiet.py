"""Keeping a chatty library off the terminal while it works for us."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

__all__ = ["muted", "muted_threads"]


class _Muted(io.TextIOBase):
    """Swallows what the muted threads write; a live progress display, in its own thread, still gets through."""

    def __init__(self, stream: TextIO, threads: set[int]) -> None:
        super().__init__()
        self._stream = stream
        self._threads = threads

    def write(self, text: str) -> int:
        if threading.get_ident() in self._threads or type(threading.current_thread()).__name__ == "TMonitor":
            return len(text)  # tqdm's monitor redraws the bars of muted threads
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


@contextmanager
def muted(logger: str) -> Iterator[None]:
    """Drop what this thread prints, and the log lines of one library.

    Args:
        logger: the library's root logger.
    """
    threads = {threading.get_ident()}
    log = logging.getLogger(logger)
    disabled, log.disabled = log.disabled, True
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with redirect_stdout(_Muted(sys.stdout, threads)), redirect_stderr(_Muted(sys.stderr, threads)):
            yield
    finally:
        log.disabled = disabled
        log.setLevel(level)


@contextmanager
def muted_threads(prefix: str) -> Iterator[None]:
    """Drop what a library's own threads print on standard output.

    Args:
        prefix: their names begin with it; they run already.
    """
    threads = {thread.ident for thread in threading.enumerate() if thread.name.startswith(prefix)}
    with redirect_stdout(_Muted(sys.stdout, {ident for ident in threads if ident is not None})):
        yield
