"""Run an HTTP server until a signal, then finish pending requests; limit its connections."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import signal
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from leret.core.errors import RetrievalError
from leret.http.endpoints import Listening

_LONGEST_LINE = 1 << 18  # maximum bytes of a request line, which includes the query of a GET
_IDLE_S = 10.0  # seconds until a connection without a complete request head is closed
_FILES = 8192  # file descriptors that the process requests; a quarter is for connections

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_named(header: str | None, host: str) -> bool:
    """Return whether a Host header is this server's name or an IP address.

    This prevents DNS rebinding by web pages.
    """
    try:
        name = urlsplit(f"//{header or host}").hostname or ""
        return name in {"localhost", host.lower()} or ipaddress.ip_address(name) is not None
    except ValueError:
        return False


async def serve(
    application: web.Application,
    host: str,
    port: int,
    *,
    ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
    drain_s: float = 10.0,
) -> None:
    """Serve until SIGTERM, SIGINT or ``stop``.

    Then finish pending requests within ``drain_s`` seconds.

    Port 0 selects a free port. ``ready`` is called with the URL when the server accepts requests.
    """
    stop = stop or asyncio.Event()
    runner = web.AppRunner(
        application,
        handle_signals=False,
        keepalive_timeout=_IDLE_S,
        handler_cancellation=True,  # skip searches for clients that disconnected
        access_log=None,
        logger=_http_log(),
        # aiohttp waits for this time twice; 0 means forever
        shutdown_timeout=max(drain_s / 2, 0.01),
        max_line_size=_LONGEST_LINE,
        max_field_size=_LONGEST_LINE,
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    listener = None
    try:
        listener = await _listen(runner, host, port)
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, stop.set)
            except RuntimeError:
                # only the main thread gets signals; in another thread, the caller sets ``stop``
                break
        ready(Listening(host, listener.sockets[0].getsockname()[1]).url)
        await stop.wait()
    finally:
        if listener is not None:
            listener.close()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
    try:
        factory = _protocol_factory(runner)
        return await asyncio.get_running_loop().create_server(factory, host, port, backlog=128)
    except OSError as error:
        raise RetrievalError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); "
            "choose another --host or --port"
        ) from error


def _protocol_factory(runner: web.AppRunner) -> Callable[[], Any]:
    """Return a connection factory that refuses connections over a limit.

    So file descriptors do not run out.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if resource.RLIM_INFINITY in (soft, hard) else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    server: Any = runner.server
    return lambda: server() if len(server.connections) < files // 4 else _Refusal()


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
        )
        transport.close()


def _http_log() -> logging.Logger:
    """Return a logger that omits errors caused by clients, such as invalid HTTP (status 400)."""
    log = logging.getLogger("leret.server")
    theirs = (HttpProcessingError, web.RequestPayloadError)
    log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], theirs)))
    return log
