"""The viewer's server: pages over HTTP, updates of growing runs, and collecting facts."""

from __future__ import annotations

import asyncio
import hmac
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from leret.core.errors import ConfigError, LeretError
from leret.core.runs import Run
from leret.core.types import digest
from leret.http.serving import Handler, is_named
from leret.viewer.collect import command, sources
from leret.viewer.index import RunIndex
from leret.viewer.pages import ASSETS, Pages, part_of, server_url

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' "
    "data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_POLL_S = 0.5


class Viewer:
    """Server of the pages of runs.

    ``directory`` is for temporary files; nothing is written to a run. With ``token``, requests need
    it in the URL once, and then in a cookie; without, their Host must be ``host`` or an IP address.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        directory: Path,
        host: str = "localhost",
        token: str | None = None,
    ) -> None:
        self._directory = directory
        self._host = host
        self._token = token
        # browsers share cookies between the ports of a host
        self._cookie = f"leret-view-{digest(token)[:8]}"
        self._lock = asyncio.Lock()  # for all indexes, because the page of a question reads several
        self.runs: dict[str, RunIndex] = {}
        for number, run in enumerate(runs, start=1):
            name = run.path.resolve().name
            if name in self.runs:
                name = f"{name}-{number}"
            self.runs[name] = RunIndex(run, directory / f"index-{number}.db")
        self._notes: dict[str, str] = {}
        self._pages = Pages(self.runs, self._notes)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._outermost])
        app.router.add_static("/assets/", ASSETS)
        app.router.add_get(r"/{path:[\s\S]*}", self._page)
        app.on_response_prepare.append(_add_headers)
        app.cleanup_ctx.append(self._background)
        return app

    async def _background(self, _: web.Application) -> AsyncIterator[None]:
        tasks: list[asyncio.Task[None]] = []
        for name in self.runs:
            tasks.append(asyncio.create_task(self._follow(name)))
            tasks.append(asyncio.create_task(self._recollect(name)))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for index in self.runs.values():
            index.close()

    async def _follow(self, name: str) -> None:
        """Index the samples in the store, and then each sample that is added."""
        index = self.runs[name]
        while True:
            try:
                await self._locked(index.advance)
                await asyncio.sleep(_POLL_S if index.complete else 0)
            except (LeretError, OSError) as error:
                self._notes[name] = str(error)
                await asyncio.sleep(_POLL_S)

    async def _recollect(self, name: str) -> None:
        """Collect the facts whenever their files change."""
        before = None
        while True:
            with suppress(OSError):  # a file that is being replaced
                files = sources(self.runs[name].run)
                if files != before:
                    before = files
                    await self._collect(name)
            await asyncio.sleep(_POLL_S)

    async def _collect(self, name: str) -> None:
        file = self._directory / f"facts-{time.monotonic_ns()}.db"
        self._notes[name] = (
            "Gold documents, results and plots are being read; they appear when ready."
        )
        process = await asyncio.create_subprocess_exec(
            *command(self.runs[name].run, file), stderr=subprocess.PIPE
        )
        try:
            _, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            self._notes[name] = f"Gold documents, results and plots cannot be read ({last})."
            self.runs[name].version += 1
        else:
            await self._locked(self.runs[name].use, file)
            del self._notes[name]
            file.unlink()  # the open connection keeps its content

    async def _page(self, request: web.Request) -> web.StreamResponse:
        parts = _parts(request.rel_url.raw_path)
        if parts == ("live",):
            path = request.query.get("path", "")
            version = await self._locked(self._pages.version, _parts(path))
            return web.Response(text=version)
        try:
            page = await self._locked(self._pages.page, parts, request.query)
        except ConfigError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        except LeretError as error:
            raise web.HTTPInternalServerError(text=str(error)) from error
        if page is None:
            raise web.HTTPNotFound(text="no such page, question or state in this run")
        if isinstance(page, str):
            return web.Response(text=page, content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "text/csv; charset=utf-8"})
        await response.prepare(request)
        block = await self._locked(next, page, "")
        while block:
            await response.write(block.encode("utf-8", "replace"))
            block = await self._locked(next, page, "")
        return response

    async def _locked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function that reads indexes in a thread, one at a time."""
        async with self._lock:
            work = asyncio.create_task(asyncio.to_thread(function, *arguments))
            try:
                return await asyncio.shield(work)
            finally:
                # even if cancelled: no one may use or close the index before
                await asyncio.wait([work])

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token is None:
            if not is_named(request.headers.get("Host"), self._host):
                raise web.HTTPForbidden(text="unknown Host; use localhost or an IP address")
        elif not _is_equal(request.cookies.get(self._cookie), self._token):
            if not _is_equal(request.query.get("token"), self._token):
                raise web.HTTPUnauthorized(
                    text="missing or wrong token; open the address that `leret view` printed"
                )
            query = {name: value for name, value in request.query.items() if name != "token"}
            response = web.HTTPFound(server_url(*_parts(request.rel_url.raw_path), **query))
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict")
            raise response
        return await handler(request)


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part_of(unquote(part)) for part in path.split("/") if part)


def _is_equal(text: str | None, token: str) -> bool:
    if text is None:
        return False
    return hmac.compare_digest(text.encode(errors="surrogateescape"), token.encode())
