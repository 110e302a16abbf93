"""A server on 127.0.0.1 that answers as a test says, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


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
