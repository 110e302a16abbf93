"""Web sites on loopback for `leret.extras.fetch`: honest pages, hostile ones, and a record of all requests."""

import asyncio
import gzip
from contextlib import contextmanager

from aiohttp import web
from anyio.from_thread import start_blocking_portal

from tests.http.servers import Served, serving

WORDS = "The second sentence of the article tells the reader more about its subject. " * 8
BOMB = gzip.compress(b"<p>" + bytes(30 << 20))


def html(title, text, **options):
    body = (
        f"<html><head><title>{title}</title></head><body><article><h1>{title}</h1><p>{text}</p></article></body></html>"
    )
    return web.Response(text=body, content_type="text/html", **options)


class Site(Served):
    """Answers ``pages`` by path: a response, a location to redirect to, or `strange`'s reply. Other paths are 404."""

    def __init__(self, pages=None, robots=None):
        super().__init__()
        self.pages, self.robots = pages or {}, robots
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def handle(self, request):
        self.requests.append(request)
        page = self.robots if request.path == "/robots.txt" else self.pages.get(request.path)
        if isinstance(page, list):
            page = page.pop(0) if len(page) > 1 else page[0]
        if isinstance(page, web.Response):
            return web.Response(status=page.status, headers=page.headers, body=page.body)
        if page is None:
            return html("Not found", WORDS, status=404)
        return await getattr(self, page)(request) if hasattr(self, page) else web.Response(
            status=302, headers={"Location": page}
        )  # fmt: skip

    async def hang(self, request):
        await asyncio.Event().wait()

    async def wait(self, request):
        self.reached.set()
        await self.go.wait()
        return html("Late", WORDS)

    async def reset(self, request):
        request.transport.abort()

    async def endless(self, request):
        answer = web.StreamResponse(headers={"Content-Type": "text/html"})
        await answer.prepare(request)
        while True:
            await answer.write(b"<p>more and more</p>" * 1000)


@contextmanager
def sites(*servers):
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving(*servers)):
        yield portal
