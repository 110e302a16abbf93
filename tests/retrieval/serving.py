"""Servers for tests: leret's in a thread or a process, and one with the answers of a test."""

import asyncio
import json
import queue
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

from leret.core.types import Passage
from leret.retrieval.server.app import RetrieverServer, ServerSettings, serve

ROOT = Path(__file__).resolve().parents[2]


class Echo:
    """Ranks the query itself; blocks without ``go``, and records its batches."""

    digest = "echo"

    def __init__(self):
        self.batches = []
        self.go = threading.Event()
        self.go.set()
        self.error = None
        self.score = 1.0

    def search(self, queries, k):
        self.batches.append((tuple(queries), k))
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return [
            tuple(Passage(f"{q[:50]}#{i}", "T", "x | y", self.score / (i + 1)) for i in range(k)) if q.strip() else ()
            for q in queries
        ]


@contextmanager
def running(retriever, drain_s=10.0, **settings):
    """Run a server in a thread during the block: its ``url`` and ``batcher``, ``stop`` as by SIGTERM, ``join``."""
    server = RetrieverServer(retriever, ServerSettings(**settings), engine="echo", corpus="c", documents=3)
    loop, stop, urls = asyncio.new_event_loop(), asyncio.Event(), queue.Queue()
    work = serve(server, "127.0.0.1", 0, ready=urls.put, stop=stop, drain_s=drain_s)
    thread = threading.Thread(target=loop.run_until_complete, args=(work,), daemon=True)
    thread.start()

    def end():
        loop.call_soon_threadsafe(stop.set)

    def join():
        thread.join(30)
        assert not thread.is_alive()

    try:
        yield SimpleNamespace(url=urls.get(timeout=30), batcher=server.batcher, stop=end, join=join)
    finally:
        end()
        join()


def served(index, port=0):
    """Start ``leret serve retriever``: its URL, and the process."""
    return started("-m", "leret", "serve", "retriever", str(index), "--port", str(port))


@contextmanager
def started(*arguments):
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    try:
        said = ""
        while " at http" not in said:
            line = process.stdout.readline()
            assert line, f"the server ended: {said}"
            said += line
        yield said.rsplit(" at ", 1)[1].strip(), process
    finally:
        process.kill()
        process.wait()


@dataclass
class Reply:
    """An answer. ``cut`` announces more bytes than are sent."""

    body: str | bytes | dict | list = ""
    status: int = 200
    headers: dict = field(default_factory=dict)
    cut: bool = False
    delay_s: float = 0.0


@contextmanager
def loopback(answer):
    """Run a server during the block: its ``url``, and the requests that it was ``asked``.

    ``answer`` makes a Reply of a request, in several threads; a Reply answers all requests.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self):
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            text = parts.query if self.command == "GET" else body.decode("utf-8", "replace")
            params = {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}
            asked = SimpleNamespace(
                method=self.command,
                path=parts.path,
                params=params,
                body=body,
                json=json.loads(body) if body.startswith(b"{") else None,
                headers=dict(self.headers),
            )
            server.asked.append(asked)
            reply = answer if isinstance(answer, Reply) else answer(asked)
            time.sleep(reply.delay_s)
            data = reply.body if isinstance(reply.body, str | bytes) else json.dumps(reply.body)
            data = data.encode() if isinstance(data, str) else data
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": len(data) + 10 * reply.cut}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = self.close_connection or reply.cut

        do_GET = do_POST = _handle  # noqa: N815  names of http.server's

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = SimpleNamespace(url=f"http://127.0.0.1:{httpd.server_port}", asked=[])
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join(timeout=5)
