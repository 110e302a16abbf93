"""Servers for tests: leret's in a thread or a process, and one with the answers of a test."""

import asyncio
import json
import queue
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from aiohttp import web
from anyio.from_thread import start_blocking_portal

from leret.config.retriever import RemoteSettings
from leret.core.types import Passage
from leret.http.serving import serve
from leret.retrieval.clients.remote import Remote
from leret.retrieval.load import OpenRetriever
from leret.retrieval.server.app import RetrieverServer
from leret.retrieval.server.schemas import ServerSettings
from tests.http.servers import Served, serving

ROOT = Path(__file__).resolve().parents[2]
POST = b"POST /search HTTP/1.1\r\nHost: localhost\r\n"


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


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
def listening(application, drain_s=10.0):
    """Serve an application in a thread during the block: its ``url``, ``stop`` as by SIGTERM, ``join``."""
    loop, stop, urls = asyncio.new_event_loop(), asyncio.Event(), queue.Queue()
    work = serve(application, "127.0.0.1", 0, ready=urls.put, stop=stop, drain_s=drain_s)
    thread = threading.Thread(target=loop.run_until_complete, args=(work,), daemon=True)
    thread.start()

    def end():
        loop.call_soon_threadsafe(stop.set)

    def join():
        thread.join(30)
        assert not thread.is_alive()

    try:
        yield SimpleNamespace(url=urls.get(timeout=30), stop=end, join=join)
    finally:
        end()
        join()


@contextmanager
def running(retriever, drain_s=10.0, **settings):
    """Run a server in a thread during the block: like `listening`, and its ``batcher``."""
    opened = retriever if isinstance(retriever, OpenRetriever) else OpenRetriever(retriever, "echo", "c", 3)
    server = RetrieverServer(opened, ServerSettings(**settings))
    with listening(server.application(), drain_s) as one:
        one.batcher = server.batcher
        yield one


def remote(url, corpus=None, **settings):
    return Remote(RemoteSettings(**{"urls": (url,), "timeout_s": 10.0, "retry_for_s": 0.0, **settings}), corpus)


class Reply(web.Response):
    def __init__(self, body="", status=200, headers=None):
        text = body if isinstance(body, str | bytes) else json.dumps(body)
        super().__init__(body=text.encode() if isinstance(text, str) else text, status=status, headers=headers)


class Loopback(Served):
    def __init__(self, answer):
        super().__init__()
        self.answer, self.asked = answer, self.requests

    async def route(self, request, body):
        return self.answer if isinstance(self.answer, Reply) else self.answer(self.asked[-1])


@contextmanager
def loopback(answer):
    """Run a server during the block: its ``url``, and the requests that it was ``asked``."""
    server = Loopback(answer)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving(server)):
        yield server
