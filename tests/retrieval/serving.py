"""Servers for tests: leret's, in a thread or as the process that a user starts, and one that answers as a test says."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

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


@dataclass
class Asked:
    """A request as it came in."""

    method: str
    path: str
    params: dict[str, str]
    body: bytes
    headers: dict[str, str]
    at: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """An answer. ``cut`` sends a longer Content-Length than body, then hangs up."""

    body: str | bytes | dict[str, Any] | list[Any] = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    delay_s: float = 0.0


@dataclass
class Loopback:
    """A running server."""

    url: str
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def loopback(answer: Callable[[Asked], Reply], port: int = 0) -> Iterator[Loopback]:
    """Serve until the end of the block; ``answer`` may be called by several threads at once."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            text = parts.query if self.command == "GET" else body.decode("utf-8", "replace")
            params = {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}
            asked = Asked(self.command, parts.path, params, body, dict(self.headers), time.monotonic())
            with lock:
                server.asked.append(asked)
            reply = answer(asked)
            time.sleep(reply.delay_s)
            data = reply.body if isinstance(reply.body, str | bytes) else json.dumps(reply.body)
            data = data.encode() if isinstance(data, str) else data
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) + (10 if reply.cut else 0)))
            self.end_headers()
            self.wfile.write(data)
            if reply.cut:
                self.close_connection = True

        do_GET = do_POST = _handle  # noqa: N815  names of http.server's

        def log_message(self, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    httpd.daemon_threads = True
    server = Loopback(f"http://127.0.0.1:{httpd.server_port}")
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join(timeout=5)
