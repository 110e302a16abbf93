"""Retrieval server: an aiohttp application for one retriever, and the function that runs it."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import leret
from leret.core.errors import LeretError
from leret.core.types import Ranking
from leret.http.serving import Handler, is_named
from leret.retrieval.batching import QueueFullError, SearchBatcher
from leret.retrieval.load import OpenRetriever
from leret.retrieval.server import schemas
from leret.retrieval.server.schemas import BadRequestError, ServerSettings

_LOG = logging.getLogger("leret")

_MANY = 200  # responses with this many documents or more (about 2 ms) are encoded in a thread


class _Metrics:
    """Metrics for /metrics. Each server in a process has a separate registry."""

    def __init__(self, n_waiting: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        new: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "leret_requests", "Requests by path and status.", ("path", "status"), **new
        )
        self.queries = Counter("leret_queries", "Queries answered.", **new)
        self.rejected = Counter(
            "leret_rejected", "Requests refused because the queue was full.", **new
        )
        self.seconds = Histogram(
            "leret_request_seconds", "Seconds per search request, including the queue.", **new
        )
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.batches = Histogram("leret_batch_queries", "Queries per batch.", buckets=sizes, **new)
        self.engine = Histogram("leret_engine_seconds", "Engine seconds per batch.", **new)
        Gauge("leret_queue_queries", "Queries in the queue.", **new).set_function(n_waiting)

    def on_batch(self, n: int, seconds: float) -> None:
        self.queries.inc(n)
        self.batches.observe(n)
        self.engine.observe(seconds)


class RetrieverServer:
    """Application for one retriever.

    GET /health reports ``engine``, ``corpus`` and ``documents``.
    """

    def __init__(self, source: OpenRetriever, settings: ServerSettings | None = None) -> None:
        self.settings = settings = settings or ServerSettings()
        self.index = source.retriever.digest
        self._description = {
            "engine": source.engine,
            "index": self.index,
            "corpus": source.corpus,
            "documents": source.documents,
            "max_k": settings.max_k,
            "max_queries": settings.max_waiting,
            "max_documents": settings.max_documents,
            "version": leret.__version__,
        }
        self._metrics = _Metrics(lambda: self.batcher.n_waiting)
        self.batcher = SearchBatcher(
            source.retriever, settings.max_batch, settings.max_waiting, self._metrics.on_batch
        )

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self.settings.max_body, middlewares=[self._outermost])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        for path in ("/", "/api/search"):
            app.router.add_get(path, self._colbert)
            app.router.add_post(path, self._colbert)
        app.router.add_post("/search", self._search)
        app.router.add_post("/retrieve", self._retrieve)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        self.batcher.close()

    async def _colbert(self, request: web.Request) -> web.Response:
        values = await self._json(request) if request.method == "POST" else request.query
        asked = schemas.parse(values, schemas.SingleRequest, self.settings)
        [ranking] = await self.batcher.search(asked.queries, asked.k)
        return _answer(schemas.colbert_answer(ranking))

    async def _search(self, request: web.Request) -> web.Response:
        asked = schemas.parse(await self._json(request), schemas.BatchRequest, self.settings)
        rankings = await self.batcher.search(asked.queries, asked.k)
        return _answer(await self._encode(schemas.leret_answer, rankings, self.index))

    async def _retrieve(self, request: web.Request) -> web.Response:
        values = await self._json(request)
        if isinstance(values, dict):
            values = {"topk": 3, **values}
        asked = schemas.parse(values, schemas.BatchRequest, self.settings)
        rankings = await self.batcher.search(asked.queries, asked.k)
        return _answer(await self._encode(schemas.retrieve_answer, rankings, asked.return_scores))

    async def _json(self, request: web.Request) -> Any:
        try:
            async with asyncio.timeout(self.settings.read_s):
                body = await request.read()
            return json.loads(body)
        except TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        except web.RequestPayloadError as error:
            raise BadRequestError(
                f"cannot read the request body ({' '.join(str(error).split())})"
            ) from error
        except (ValueError, RecursionError) as error:
            raise BadRequestError(
                f"the request body is not valid JSON ({error}); send a JSON object"
            ) from error

    async def _encode(
        self, answer: Callable[..., bytes], rankings: list[Ranking], fact: Any
    ) -> bytes:
        """Encode a response.

        Large responses are encoded in a thread, so that they do not block the event loop.
        """
        if sum(map(len, rankings)) < _MANY:
            return answer(rankings, fact)
        return await asyncio.to_thread(answer, rankings, fact)

    async def _health(self, request: web.Request) -> web.Response:
        health: dict[str, Any] = {"status": "ok"}
        if self._is_allowed(request):
            health |= self._description
            health["waiting"] = self.batcher.n_waiting
        return _answer(schemas.encode(health))

    async def _show_metrics(self, _: web.Request) -> web.Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(
            body=generate_latest(self._metrics.registry), headers={"Content-Type": kind}
        )

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.perf_counter()
        route = request.match_info.route.resource
        path = route.canonical if route is not None else "unknown"
        answer = await self._handled(request, handler, path)
        self._metrics.requests.labels(path=path, status=str(answer.status)).inc()
        if path not in {"/health", "/metrics", "unknown"} and answer.status == 200:
            self._metrics.seconds.observe(time.perf_counter() - began)
        return answer

    async def _handled(
        self, request: web.Request, handler: Handler, path: str
    ) -> web.StreamResponse:
        if self.settings.token is None and not is_named(
            request.headers.get("Host"), self.settings.host
        ):
            return _error(
                403,
                "unknown Host; use localhost, an IP address or --host, "
                "or start the server with a token",
            )
        if path != "/health" and not self._is_allowed(request):
            return _error(
                401, "missing or wrong token; send the header Authorization: Bearer TOKEN"
            )
        try:
            return await handler(request)
        except BadRequestError as error:
            return _error(400, str(error))
        except QueueFullError as error:
            self._metrics.rejected.inc()
            return _error(503, str(error), {"Retry-After": f"{error.wait_s:.0f}"})
        except web.HTTPRequestEntityTooLarge:
            return _error(
                413, f"the request body exceeds {self.settings.max_body} bytes; send fewer queries"
            )
        except web.HTTPException as error:
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            return _error(
                error.status, f"{error.reason}: {request.method} {request.path[:200]}", allowed
            )
        except LeretError as error:
            _LOG.error("the engine failed: %s", error)
            return _error(500, f"the engine failed: {error}")
        except (ConnectionError, TimeoutError):
            raise  # the client closed the connection
        except Exception as error:
            _LOG.exception("the engine crashed")
            return _error(500, f"the engine crashed: {type(error).__name__}: {error}")

    def _is_allowed(self, request: web.Request) -> bool:
        token = self.settings.token
        if token is None:
            return True
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        # aiohttp and os.environ decode invalid UTF-8 to lone surrogates
        sent_bytes = sent.strip().encode(errors="surrogateescape")
        is_same = hmac.compare_digest(sent_bytes, token.encode(errors="surrogateescape"))
        return is_same and scheme.lower() == "bearer"


def _answer(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    answer = _answer(schemas.encode({"error": True, "message": message}), status)
    answer.headers.update(headers or {})
    return answer
