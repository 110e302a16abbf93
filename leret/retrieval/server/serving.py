"""Running the retrieval server until it is told to stop: what is asked by then is still answered."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from leret.core.errors import RetrievalError
from leret.retrieval.server.app import RetrieverServer

_LONGEST_LINE = 1 << 18
"""Bytes of a request line: a query by GET is in it."""

_IDLE_S = 10.0
"""Until a connection without a whole head of a request is closed."""
_FILES = 8192
"""Descriptors that the process takes where it may; a quarter of those it has is for connections."""


def run(server: RetrieverServer, host: str, port: int, *, ready: Callable[[str], None], drain_s: float = 10.0) -> None:
    """A process's whole work: `serve`, and the end of the process where a search outlasts the drain.

    Raises:
        RetrievalError: as `serve` does.
    """
    asyncio.run(serve(server, host, port, ready=ready, drain_s=drain_s))
    if server.queue.is_searching:  # the interpreter would wait for its thread
        logging.getLogger("leret").warning("a search took longer than the drain of %g s; it is given up", drain_s)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def serve(
    server: RetrieverServer,
    host: str,
    port: int,
    *,
    ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
    drain_s: float = 10.0,
) -> None:
    """Serve until SIGTERM, SIGINT or ``stop``.

    Args:
        server: the application.
        host: where to listen.
        port: 0 takes a free one.
        ready: hears the URL once requests are taken.
        stop: ends the server; None leaves that to signals.
        drain_s: how long requests that are being answered are waited for; the engine's thread may outlast it.

    Raises:
        RetrievalError: the port is taken, or the host is not of this machine.
    """
    stop = stop or asyncio.Event()
    runner = web.AppRunner(
        server.application(),
        handle_signals=False,
        keepalive_timeout=_IDLE_S,
        handler_cancellation=True,  # nobody is searched for who has hung up
        access_log=None,
        logger=_http_log(),
        shutdown_timeout=max(drain_s / 2, 0.01),  # aiohttp waits so long twice, and for ever where it is 0
        max_line_size=_LONGEST_LINE,
        max_field_size=_LONGEST_LINE,
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    listening, listener = [], None
    try:
        try:
            listener = await loop.create_server(_protocol_factory(runner), host, port, backlog=128)
        except OSError as error:
            raise RetrievalError(
                f"{host}:{port}: cannot listen there ({error.strerror or error}); name another --port or --host"
            ) from error
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, stop.set)
                listening.append(number)
            except (NotImplementedError, RuntimeError, ValueError):
                break  # not in the main thread: whoever started the server stops it
        ready(_url(host, listener.sockets[0].getsockname()[1]))
        await stop.wait()
    finally:
        server.draining = True
        for number in listening:
            loop.remove_signal_handler(number)  # a second Ctrl-C ends it at once
        if listener is not None:
            listener.close()
        await runner.cleanup()


def _protocol_factory(runner: web.AppRunner) -> Callable[[], Any]:
    """Makes protocols of connections, which refuse where there are many; asyncio accepts 128 before it asks for one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if resource.RLIM_INFINITY in (soft, hard) else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    server: Any = runner.server
    return lambda: server() if len(server.connections) < files // 4 else _Refusal()


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
        transport.close()


def _http_log() -> logging.Logger:
    log = logging.getLogger("leret.server")
    log.addFilter(_is_ours)
    return log


def _is_ours(record: logging.LogRecord) -> bool:
    """False for what a client did: bytes that are no HTTP have had their 400."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
