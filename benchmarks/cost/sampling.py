"""Measure `leret sample` on a server that answers at once: speed, long runs, and recovery from kills.

    python benchmarks/cost/sampling.py speed [--url http://127.0.0.1:8000/v1 --model NAME] [--profile]
    python benchmarks/cost/sampling.py long --questions 100000
    python benchmarks/cost/sampling.py kills

speed   scored samples per second with four prompts of one and of eight samples, including BM25 over HotpotQA's 29k
        documents: the median of --repeats sessions after a warm-up. Also CPU-seconds of this process, which other work
        on the machine does not change. --url uses another server. --dspy takes turns with `dspy.Evaluate` (32 threads)
        on a quarter of the questions.
long    memory and throughput from start to end, with generated questions over the same documents.
kills   20 x kill -9, without and with 30 % faulty replies (benchmarks/correctness/kills.py).

Prints Markdown. Needs HotpotQA's files (--data; the default is next to the checkout).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.correctness.kills import ROOT, server, write_prompts
from benchmarks.cost.profiling import Shares
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.programs.prompts import Prompt
from leret.rollouts.environment import Environment
from leret.sampling.stage import sample

DATA = ROOT.parent / "shared/data/hotpotqa"
AIMS = {1: 1000.0, 8: 3000.0}


class Watch:
    """Times the sampling part of the stage.

    Args:
        every: questions between two marks.
        shares: profile to record meanwhile.
    """

    def __init__(self, every: int = 0, shares: Shares | None = None) -> None:
        self.every = every
        self.shares = shares
        self.marks: list[tuple[float, float, int, float]] = []
        self.stage = ""
        self.n = 0

    def start(self, stage: str, total: int | None) -> None:
        """Start the next part of the stage."""
        self.stage = stage
        if stage == "sampling":
            self.mark(0)
            if self.shares is not None:
                self.shares.begin()

    def advance(self, n: int = 1, **facts: Any) -> None:
        """Count finished questions."""
        if self.stage != "sampling":
            return
        self.n += n
        self.samples = int(facts["samples"])
        if self.every and self.n % self.every == 0:
            self.mark(self.samples)

    def finish(self) -> None:
        """End the part."""
        if self.stage == "sampling":
            self.mark(self.samples)
            if self.shares is not None:
                self.shares.end()
        self.stage = ""

    def mark(self, samples: int) -> None:
        """Record wall-clock seconds, CPU-seconds, samples and resident MB."""
        self.marks.append((time.perf_counter(), time.process_time(), samples, resident_mb()))


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def recipe_of(arguments: argparse.Namespace, url: str, n: int, work: Path, **data: Any) -> SamplingRecipe:
    return SamplingRecipe.model_validate(
        {
            "data": {
                "kind": "hotpotqa", "split": "all", "corpus": str(arguments.data / "corpus.jsonl.gz"),
                "questions": str(arguments.data / "queries_all.jsonl.gz"), **data,
            },
            "retriever": {"k": 3, "index": str(work / "index")},
            "policy": {
                "kind": "openai", "model": arguments.model, "urls": [url], "max_tokens": 32,
                "concurrency": arguments.connections,
            },
            "program": {"path": f"{ROOT / 'pipelines/multihop.py'}:MultiHop", "hops": 2,
                        "adapter": {"kind": arguments.adapter}},
            "sampling": {"prompts": 4, "samples": n, "bank": {"path": str(work / "prompts")}},
        }
    )  # fmt: skip


@contextlib.contextmanager
def place() -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="leret-sampling-"))
    write_prompts(work / "prompts")
    try:
        yield work
    finally:
        shutil.rmtree(work)


def endpoint(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[str]:
    return contextlib.nullcontext(arguments.url) if arguments.url else server()


def speed(arguments: argparse.Namespace) -> None:
    print("\n## An instant server, BM25 in the loop\n")
    print("| samples per prompt | scored samples/s, median (min-max) | of the aim | CPU-s of our process per 1,000 "
          "| samples per CPU-second | of the aim |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    tables = []
    with place() as work, endpoint(arguments) as url:
        for n in (1, 8):
            recipe = recipe_of(arguments, url, n, work, limit=arguments.questions or (1200 if n == 1 else 400))
            rates, costs, loops, shares = [], [], [], Shares()
            environment = Environment(recipe, work)
            for repeat in range(arguments.repeats + 1):
                profiled = arguments.profile and repeat == arguments.repeats
                watch = Watch(shares=shares if profiled else None)
                sample(recipe, Run.create(work / "run"), progress=watch)
                shutil.rmtree(work / "run")
                (wall, cpu, *_), (wall_end, cpu_end, samples, _) = watch.marks
                if repeat:
                    rates.append(samples / (wall_end - wall))
                    costs.append(1000 * (cpu_end - cpu) / samples)
                if arguments.dspy:
                    loops.append(dspy_rate(environment, work, n))
            rate, cost = statistics.median(rates), statistics.median(costs)
            print(f"| {n} | {rate:,.0f} ({min(rates):,.0f}-{max(rates):,.0f}) | {rate / AIMS[n]:.2f} | {cost:.3f} "
                  f"| {1000 / cost:,.0f} | {1000 / cost / AIMS[n]:.2f} |", flush=True)  # fmt: skip
            tables.append((n, shares))
            if loops[1:]:
                loop = statistics.median(loops[1:])
                print(f"| {n}, dspy.Evaluate | {loop:,.0f} ({min(loops[1:]):,.0f}-{max(loops[1:]):,.0f}) "
                      f"| leret / dspy {rate / loop:.2f} | | | |", flush=True)  # fmt: skip
    for n, shares in tables if arguments.profile else ():
        print(f"\nWhere the CPU-seconds go, {n} samples per prompt:\n\n{shares.table()}")


def dspy_rate(environment: Environment, work: Path, n: int) -> float:
    """Return scored samples per second of the same loop in plain DSPy."""
    from benchmarks.cost.dspy_loop import THREADS, dspy_loop

    prompts = [Prompt.load(path) for path in sorted((work / "prompts").glob("*.json"))]
    return dspy_loop(environment, prompts, max(THREADS, (environment.recipe.data.limit or 0) // 4), n).rate


def write_questions(arguments: argparse.Namespace, path: Path, n: int) -> None:
    """Write HotpotQA-like questions about two documents each."""
    rng = random.Random(0)
    with gzip.open(arguments.data / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    with path.open("w", encoding="utf-8") as file:
        for i in range(n):
            one, two = rng.sample(documents, 2)
            text = f"Which of {one['title']} and {two['title']} has to do with {' '.join(two['text'].split()[4:9])}?"
            gold = [one["doc_id"], two["doc_id"]]
            row = {"id": f"generated-{i}", "question": text, "answer": "", "relevant_doc_ids": gold}
            file.write(json.dumps(row) + "\n")


def opened_mb(recipe: SamplingRecipe) -> float:
    """Return the resident MB of a process that has imported leret and searched the index once, without questions."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    if not os.fork():
        from benchmarks.correctness.kills import preload

        preload()
        environment = Environment(recipe, Path())
        environment.retriever.search(["film"], 3)
        os.write(writing, str(resident_mb()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        told = float(file.read())
    os.wait()
    return told


def long(arguments: argparse.Namespace) -> None:
    n = arguments.questions or 100_000
    with place() as work, endpoint(arguments) as url:
        write_questions(arguments, work / "questions.jsonl", n)
        recipe = recipe_of(arguments, url, arguments.samples, work, questions=str(work / "questions.jsonl"))
        base = opened_mb(recipe)
        watch = Watch(every=max(1, n // 20))
        began = time.perf_counter()
        report = sample(recipe, Run.create(work / "run"), progress=watch)
        seconds = time.perf_counter() - began
        peak_mb = float(next(line for line in Path("/proc/self/status").read_text().splitlines()
                             if line.startswith("VmHWM")).split()[1]) / 1024  # fmt: skip
        size_mb = sum(file.stat().st_size for file in (work / "run").glob("rollouts.db*")) / 2**20
    print(f"\n## {n:,} generated questions, 2 hops, 4 prompts x {arguments.samples}\n")
    print("| part of the run | samples/s | samples per CPU-second | resident MB above the index |")
    print("|---|---|---|---|")
    rows = []
    for before, after in zip(watch.marks, watch.marks[1:], strict=False):
        done = after[2] - before[2]
        if done:
            rows.append((done / (after[0] - before[0]), done / (after[1] - before[1]), after[3] - base))
    for i, (wall, cpu, mb) in enumerate(rows, 1):
        print(f"| {i}/{len(rows)} | {wall:,.0f} | {cpu:,.0f} | {mb:,.0f} |")
    # The first twentieth is a warm-up of connections, caches and kernel memory.
    fifth = max(1, len(rows) // 5)
    first, last = rows[1 : 1 + fifth] or rows, rows[-fifth:]
    for name, column in (("samples/s", 0), ("samples per CPU-second", 1)):
        ratio = statistics.mean(row[column] for row in last) / statistics.mean(row[column] for row in first)
        print(f"\nEnd to start, {name}: {ratio:.3f} (aim: .95)")
    grown = last[-1][2] - first[0][2]
    print(
        f"\nResident above the index ({base:,.0f} MB): at most {max(row[2] for row in rows):,.0f} MB while sampling, "
        f"of which {grown:+,.0f} MB came after the start; peak of the whole stage {peak_mb - base:,.0f} MB (aim: 300). "
        f"{report.samples:,} samples, {report.pairs:,} pairs, store {size_mb:,.0f} MB, {seconds:,.0f} s in all."
    )


def kills(arguments: argparse.Namespace) -> None:
    print("\n## 20 x kill -9\n")
    print("| samples per prompt | faulty replies | kills | requests | finished and asked again "
          "| answered, not committed at a kill, asked again | equal to the undisturbed run |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for samples, faults in ((1, 0.0), (8, 0.0), (1, 0.3)):
        command = [sys.executable, str(ROOT / "benchmarks/correctness/kills.py"),
                   "--kills", str(arguments.kills), "--samples", str(samples), "--faults", str(faults),
                   "--questions", str(arguments.questions or 400), "--timeout-s", "5" if faults else "60"]  # fmt: skip
        told = json.loads(subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout)
        print(f"| {samples} | {faults:.0%} | {len(told['at'])} | {told['requests']} | {told['asked_twice']} "
              f"| {told['repeated']} | {'yes' if told['equal'] else 'NO'} |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "long", "kills"])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of HotpotQA's files")
    parser.add_argument("--url", help="another server's base URL, ending in /v1")
    parser.add_argument("--model", default="instant", help="name of the served model")
    parser.add_argument("--adapter", default="chat", help="program.adapter.kind")
    parser.add_argument("--connections", type=int, default=32, help="requests in flight")
    parser.add_argument("--questions", type=int, help="number of questions")
    parser.add_argument("--samples", type=int, default=1, help="completions per prompt and state (long)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--dspy", action="store_true", help="also measure plain DSPy (speed)")
    parser.add_argument("--profile", action="store_true", help="also print a profile (speed)")
    arguments = parser.parse_args()
    {"speed": speed, "long": long, "kills": kills}[arguments.part](arguments)


if __name__ == "__main__":
    main()
