"""Bodies of requests: read as JSON, and none waited for for ever."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import json
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

import leret
from leret.core.errors import LeretError
from leret.core.types import Ranking
from leret.retrieval.base import Retriever
from leret.retrieval.server.batching import BatchQueue, FullError
from leret.retrieval.server.metrics import CONTENT_TYPE, Counter, Gauge, Histogram, exposition
from leret.retrieval.server.schemas import (
    BadRequestError,
    Limits,
    batch_asked,
    colbert_answer,
    encoded,
    leret_answer,
    one_asked,
    retrieve_answer,
)


class Bodies:
    """Reads the bodies of requests.

    Args:
        limit_s: until a body must be there.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._open: set[asyncio.Timeout] = set()

    def __len__(self) -> int:
        """Bodies that are being read."""
        return len(self._open)

    async def json(self, request: web.Request) -> Any:
        """The JSON of a body.

        Raises:
            BadRequestError: it is none.
            HTTPRequestTimeout: it did not come in time, or ``stop`` came first.
        """
        try:
            return json.loads(await self._read(request))
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the request is no JSON ({error})") from error

    def stop(self) -> None:
        """Wait for no body any longer."""
        for limit in self._open:
            if not limit.expired():
                limit.reschedule(0)

    async def _read(self, request: web.Request) -> bytes:
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                self._open.add(limit)
                return await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        except web.RequestPayloadError as error:
            raise BadRequestError(f"the body cannot be read ({' '.join(str(error).split())})") from error
        finally:
            self._open.discard(limit)


pass


_LOG = logging.getLogger("leret")

_RETRY_S = 1
_MANY = 200
"""Documents, from which on an answer is encoded in a thread; some 2 ms."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ServerSettings:
    """What a server allows.

    Attributes:
        token: that clients must send; None lets everybody in who asks for the host by its number, or as here named.
        host: name that the server is reached by, beside localhost.
        max_waiting: queries in the queue.
        max_batch: queries that the engine is asked at once.
        max_k: documents a query.
        max_queries: queries a request.
        max_documents: queries times k of a request; the default is what leret's client asks at most by default.
        max_body: bytes a request.
        read_s: seconds until the body of a request must be there.
    """

    token: str | None = None
    host: str = "localhost"
    max_waiting: int = 1024
    max_batch: int = 64
    max_k: int = 1000
    max_queries: int = 1024
    max_documents: int = 64_000
    max_body: int = 4 << 20
    read_s: float = 60.0


class RetrieverServer:
    """The application around one retriever.

    Args:
        retriever: called in one thread.
        settings: of the server.
        engine: kind of the retriever, for /health.
        corpus: digest of its corpus; None where it has none.
        documents: in its corpus; None where nobody can count them.
    """

    def __init__(
        self,
        retriever: Retriever,
        settings: ServerSettings | None = None,
        *,
        engine: str,
        corpus: str | None = None,
        documents: int | None = None,
    ) -> None:
        self.settings = settings or ServerSettings()
        self.index = retriever.digest
        self.draining = False
        self._facts = {"engine": engine, "index": self.index, "corpus": corpus, "documents": documents}
        allowed = self.settings
        self._limits = Limits(
            min(allowed.max_k, allowed.max_documents),
            min(allowed.max_queries, allowed.max_waiting),
            allowed.max_documents,
        )
        self._began = time.time()
        self._count(engine)
        self.queue = BatchQueue(retriever, self.settings.max_waiting, self.settings.max_batch, self._on_batch)
        self.bodies = Bodies(self.settings.read_s)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="leret-encode")

    def _count(self, engine: str) -> None:
        self._requests = Counter("leret_requests_total", "Requests by path and status.")
        self._queries = Counter("leret_queries_total", "Queries answered.")
        self._full = Counter("leret_rejected_total", "Requests refused because the queue was full.")
        self._seconds = Histogram(
            "leret_request_seconds",
            "Seconds of a search request, waiting included.",
            (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
        )
        self._batches = Histogram("leret_batch_queries", "Queries of a batch.", (1, 2, 4, 8, 16, 32, 64, 128, 256))
        self._engine_seconds = Histogram(
            "leret_engine_seconds", "Seconds of a batch in the engine.", (0.001, 0.005, 0.025, 0.1, 0.5, 2.5)
        )
        self._metrics: list[Counter | Gauge | Histogram] = [
            self._requests,
            self._queries,
            self._full,
            self._seconds,
            self._batches,
            self._engine_seconds,
            Gauge("leret_queue_queries", "Queries that wait.", lambda: self.queue.n_waiting),
            Gauge("leret_start_time_seconds", "When the server started.", lambda: self._began),
            Gauge("leret_retriever_info", "What is served.", lambda: 1, engine=engine, index=self.index),
        ]

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=self.settings.max_body, middlewares=[self._outermost])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        for path in ("/", "/api/search"):
            app.router.add_get(path, self._colbert)
            app.router.add_post(path, self._colbert)
        app.router.add_post("/search", self._search)
        app.router.add_post("/retrieve", self._retrieve)
        app.on_shutdown.append(self._stop_reading)
        app.on_cleanup.append(self._close)
        return app

    async def _stop_reading(self, _: web.Application) -> None:
        self.bodies.stop()  # aiohttp reads no more

    async def _close(self, _: web.Application) -> None:
        self.queue.close()
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def _on_batch(self, n: int, seconds: float) -> None:
        self._queries.add(n)
        self._batches.observe(n)
        self._engine_seconds.observe(seconds)

    async def _colbert(self, request: web.Request) -> web.Response:
        values = await self.bodies.json(request) if request.method == "POST" else request.query
        if not hasattr(values, "get"):
            raise BadRequestError("the request is no JSON object")
        asked = one_asked(values, self._limits)
        return _answer(colbert_answer((await self.queue.search(asked.queries, asked.k))[0]))

    async def _search(self, request: web.Request) -> web.Response:
        asked = batch_asked(await self.bodies.json(request), self._limits, "k")
        found = await self.queue.search(asked.queries, asked.k)
        return _answer(await self._encoded(leret_answer, found, self.index))

    async def _retrieve(self, request: web.Request) -> web.Response:
        values = await self.bodies.json(request)
        asked = batch_asked(values, self._limits, "topk", 3)
        found = await self.queue.search(asked.queries, asked.k)
        return _answer(await self._encoded(retrieve_answer, found, values.get("return_scores") is True))

    async def _encoded(self, answer: Callable[..., bytes], found: list[Ranking], fact: Any) -> bytes:
        """A large answer is made in a thread: others are answered meanwhile."""
        if sum(map(len, found)) < _MANY:
            return answer(found, fact)
        return await asyncio.get_running_loop().run_in_executor(self._encoder, answer, found, fact)

    async def _health(self, request: web.Request) -> web.Response:
        status = "draining" if self.draining else "ok"
        facts: dict[str, Any] = {"status": status}
        if self._is_allowed(request):
            facts |= self._facts | asdict(self._limits)
            facts |= {"waiting": self.queue.n_waiting, "version": leret.__version__}
        return _answer(encoded(facts), 503 if self.draining else 200)

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=exposition(self._metrics).encode(), headers={"Content-Type": CONTENT_TYPE})

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets in who may come in, turns what is raised into an answer, and counts."""
        began = time.perf_counter()
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "unknown"
        searches = path not in {"/health", "/metrics", "unknown"}
        answer = await self._handled(request, handler, path)
        self._requests.add(path=path, status=str(answer.status))
        if searches and answer.status == 200:
            self._seconds.observe(time.perf_counter() - began)
        return answer

    async def _handled(self, request: web.Request, handler: Handler, path: str) -> web.StreamResponse:
        if self.settings.token is None and not _is_named(request.headers.get("Host"), self.settings.host):
            return _error(403, "without a token this server answers to localhost, to its --host and to numbers only")
        if path != "/health" and not self._is_allowed(request):
            return _error(401, "this server asks for a token; send it as Authorization: Bearer TOKEN")
        if self.draining and path != "/health":
            return _stopping()
        try:
            return await handler(request)
        except BadRequestError as error:
            return _error(400, str(error))
        except FullError as error:
            self._full.add()
            return _error(503, str(error), {"Retry-After": f"{error.wait_s:.0f}"})
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the request is larger than {self.settings.max_body} bytes")
        except web.HTTPException as error:
            if self.draining and isinstance(error, web.HTTPRequestTimeout):
                return _stopping()
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            return _error(error.status, f"{error.reason}: {request.method} {request.path[:200]}", allowed)
        except LeretError as error:
            _LOG.error("the engine failed: %s", error)
            return _error(500, f"the engine failed: {error}")
        except (ConnectionError, TimeoutError):
            raise  # the client is gone; there is nobody to answer
        except Exception as error:
            _LOG.exception("the engine crashed")
            return _error(500, f"the engine crashed: {type(error).__name__}: {error}")

    def _is_allowed(self, request: web.Request) -> bool:
        token = self.settings.token
        if token is None:
            return True
        given = _given_token(request.headers.get("Authorization", ""))
        # aiohttp reads bytes that are no UTF-8 as lone surrogates, and so does os.environ
        return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode(errors="surrogateescape"))


def _is_named(header: str | None, host: str) -> bool:
    """Is it this server that a client asks? A web page whose name was made to mean this machine asks for its own."""
    try:
        name = urlsplit(f"//{header or host}").hostname or ""
        return name in {"localhost", host.lower()} or ipaddress.ip_address(name) is not None
    except ValueError:
        return False


def _given_token(header: str) -> str:
    """The bearer token, or the password of basic authentication: clients that take a URL alone have only that."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value).decode("utf-8", "replace").partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return value.strip() if scheme.lower() == "bearer" else ""


def _answer(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _stopping() -> web.Response:
    answer = _error(503, "the server is being stopped", {"Retry-After": str(_RETRY_S)})
    answer.force_close()
    return answer


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    answer = _answer(encoded({"error": True, "message": message}), status)
    answer.headers.update(headers or {})
    return answer
