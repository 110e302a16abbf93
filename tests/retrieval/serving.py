"""The retrieval server for tests: in a thread, or as the process that a user starts."""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leret.core.types import Passage, Ranking
from leret.retrieval.base import Retriever
from leret.retrieval.server.app import RetrieverServer, ServerSettings, serve

ROOT = Path(__file__).resolve().parents[2]


class Echo:
    """Finds the query itself; can be held, and remembers its batches."""

    digest = "echo"

    def __init__(self) -> None:
        self.batches: list[tuple[tuple[str, ...], int]] = []
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None
        self.score = 1.0

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        self.batches.append((tuple(queries), k))
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return [
            tuple(Passage(f"{q[:50]}#{i}", "T", "x | y", self.score / (i + 1)) for i in range(k)) if q.strip() else ()
            for q in queries
        ]


class Running:
    """A server in a thread.

    Attributes:
        url: where it listens.
        stop: ends it, as SIGTERM would.
    """

    def __init__(self, server: RetrieverServer, drain_s: float = 10.0) -> None:
        self._drain_s = drain_s
        self.server = server
        self._told: queue.Queue[str] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.url = self._told.get(timeout=30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        work = serve(self.server, "127.0.0.1", 0, ready=self._told.put, stop=self._stop, drain_s=self._drain_s)
        self._loop.run_until_complete(work)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextmanager
def running(retriever: Retriever, **settings: Any) -> Iterator[Running]:
    """A server until the end of the block."""
    server = Running(RetrieverServer(retriever, ServerSettings(**settings), engine="echo", corpus="c", documents=3))
    try:
        yield server
    finally:
        server.stop()
        server.join()


@contextmanager
def served(index: Path, *arguments: str, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``leret serve retriever`` as a process: its URL, and the process."""
    with started("-m", "leret", "serve", "retriever", str(index), "--port", str(port), *arguments) as told:
        yield told


@contextmanager
def started(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A Python process that serves: the URL that it tells, and the process."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        said = ""
        while " at http" not in said:
            line = process.stdout.readline()
            assert line, f"the server ended: {said}"
            said += line
        yield said.rsplit(" at ", 1)[1].strip(), process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
