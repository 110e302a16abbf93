"""Compare CPU time per request of `OpenAIPolicy` and of a bare aiohttp client that sends the same bytes.

The server answers at once in another process, so only the client is measured. After a warm-up, both clients take turns
in one process. Prints the medians of several rounds and their ratio::

    python benchmarks/cost/transport.py --requests 4000 --connections 32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import aiohttp

from leret.config.policy import OpenAIPolicySettings
from leret.policies.base import Request
from leret.policies.remote.openai import OpenAIPolicy

MESSAGES = (
    {"role": "system", "content": "Your input fields are:\n1. `context`\n2. `question`\nWrite a search query. " * 6},
    {"role": "user", "content": "[[ ## context ## ]]\n" + "A passage of some forty words about a city. " * 30},
)


class Instant(asyncio.Protocol):
    """Answers each HTTP request with the same chat completion."""

    def __init__(self, n: int) -> None:
        choices = [
            {"index": i, "message": {"role": "assistant", "content": "a query about a city"}, "finish_reason": "stop"}
            for i in range(n)
        ]
        usage = {"prompt_tokens": 400, "completion_tokens": 6 * n, "total_tokens": 400 + 6 * n}
        body = json.dumps({"id": "x", "object": "chat.completion", "choices": choices, "usage": usage}).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.answer = head.encode() + body
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + size:
                return
            self.buffer = self.buffer[end + 4 + size :]
            self.transport.write(self.answer)  # type: ignore[attr-defined]


def serve(pipe: Connection, n: int) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Instant(n), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def bare(url: str, bodies: list[bytes], connections: int) -> float:
    """Return CPU-seconds per request of a client that only sends and reads JSON."""
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as session:

        async def one(body: bytes) -> None:
            async with session.post(f"{url}/chat/completions", data=body, headers=headers) as answer:
                assert json.loads(await answer.read())["choices"][0]["message"]["content"]

        return await timed(one, bodies, connections)


async def ours(url: str, requests: list[Request], connections: int) -> float:
    """Return CPU-seconds per request of the policy."""
    policy = OpenAIPolicy(OpenAIPolicySettings(model="m", urls=(url,), concurrency=connections))

    async def one(request: Request) -> None:
        assert (await policy.complete(request))[0].text

    try:
        return await timed(one, requests, connections)
    finally:
        await policy.aclose()


async def timed(one, work, connections):
    pending = iter(work)

    async def worker() -> None:
        for item in pending:
            await one(item)

    began = time.process_time()
    await asyncio.gather(*[worker() for _ in range(connections)])
    return (time.process_time() - began) / len(work)


async def compare(url: str, n_requests: int, connections: int, rounds: int, n: int) -> tuple[list[float], list[float]]:
    requests = [Request(MESSAGES, tuple(range(i, i + n)), 1.0, 64) for i in range(n_requests)]
    bodies = [
        json.dumps(
            {
                "model": "m",
                "messages": MESSAGES,
                "temperature": 1.0,
                "top_p": 1.0,
                "max_tokens": 64,
                "seed": i,
                **({"n": n} if n > 1 else {}),
            }
        ).encode()
        for i in range(n_requests)
    ]
    a, b = [], []
    for index in range(rounds + 1):
        one, other = await bare(url, bodies, connections), await ours(url, requests, connections)
        if index:  # the first round warms up
            a.append(one)
            b.append(other)
    return a, b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=1, help="choices per request")
    asked = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(there, asked.n), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"
    try:
        a, b = asyncio.run(compare(url, asked.requests, asked.connections, asked.rounds, asked.n))
    finally:
        server.terminate()
        server.join()
    for name, seconds in (("bare aiohttp", a), ("OpenAIPolicy", b)):
        print(
            f"{name}: {statistics.median(seconds) * 1e6:.0f} us of CPU per request (median of {len(seconds)} rounds), "
            f"{min(seconds) * 1e6:.0f} at best"
        )
    ratio = statistics.median(y / x for x, y in zip(a, b, strict=True))
    print(f"ratio: {ratio:.3f} (median); of the best rounds: {min(b) / min(a):.3f}")


if __name__ == "__main__":
    main()
