"""Servers on loopback that go through faults before they answer, and remember what they were asked."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

from aiohttp import web


class Served:
    """Goes through ``faults`` before it answers: a response, ``reset`` or ``stall``; None answers."""

    def __init__(self, faults=None):
        self.faults = faults or []
        self.requests = []
        self.url = ""

    @property
    def bodies(self):
        return [seen.json for seen in self.requests if seen.json is not None]

    @property
    def paths(self):
        return [seen.path for seen in self.requests]

    async def route(self, request, body):
        raise NotImplementedError

    async def handle(self, request):
        text = await request.text()
        body = json.loads(text) if request.content_type == "application/json" and text else None
        params = dict(request.query or await request.post())  # of the URL or the form
        facts = {"method": request.method, "path": request.path, "headers": dict(request.headers)}
        self.requests.append(SimpleNamespace(**facts, params=params, json=body))
        fault = self.faults.pop(0) if self.faults else None
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        if fault == "stall":
            await asyncio.sleep(30)
        response = fault if isinstance(fault, web.Response) else await self.route(request, body)
        return web.Response(status=response.status, headers=response.headers, body=response.body)  # each is sent once


@asynccontextmanager
async def serving(*servers, under=""):
    """Start servers on loopback; gives their base URLs, with ``under`` at the end."""
    runners = []
    for server in servers:
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.01, max_line_size=2**20)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}{under}"
        runners.append(runner)
    try:
        yield [server.url for server in servers]
    finally:
        for runner in runners:
            await runner.cleanup()
