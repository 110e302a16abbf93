"""Servers on loopback that go through faults before they answer, and remember what they were asked."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web


@dataclass
class Seen:
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


class Served:
    """Goes through ``faults`` before it answers: a response, ``reset`` or ``stall``; None answers."""

    def __init__(self, faults=None):
        self.faults = faults or []
        self.requests = []
        self.url = ""

    @property
    def bodies(self):
        return [seen.body for seen in self.requests if seen.body is not None]

    @property
    def paths(self):
        return [seen.path for seen in self.requests]

    async def route(self, request, body):
        raise NotImplementedError

    async def handle(self, request):
        text = await request.text()
        body = json.loads(text) if request.content_type == "application/json" and text else None
        self.requests.append(Seen(request.path, dict(request.query), dict(request.headers), body))
        fault = self.faults.pop(0) if self.faults else None
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        if fault == "stall":
            await asyncio.sleep(30)
        if isinstance(fault, web.Response):
            return web.Response(status=fault.status, headers=fault.headers, body=fault.body)
        return await self.route(request, body)


@asynccontextmanager
async def serving(*servers, under=""):
    """Start servers on loopback; gives their base URLs, with ``under`` at the end."""
    runners = []
    for server in servers:
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}{under}"
        runners.append(runner)
    try:
        yield [server.url for server in servers]
    finally:
        for runner in runners:
            await runner.cleanup()
