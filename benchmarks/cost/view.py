"""Measure the latency and the memory of `leret view` for a run of 100,000 questions and 800,000 samples.

Command: python benchmarks/cost/view.py [--questions 100000] [--run DIR] [--sampler N]

Writes a run with invented samples (two steps, four samples per state), results of two systems for a tenth of the
questions, and pairs; --run keeps it for another measurement. Requests go one after another, each page 20 times.

--sampler N measures `leret sample sampling/demo` in this process instead: N times alone, and N times with `leret view`
and a client that polls for changes each second and loads the changed list of questions, as an open page does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.cost.rescore import write_run
from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.evaluation.results import ScoredHop, write_rows
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.stage import sample

SYSTEMS, TIMES = ("base", "ipo"), 20


def write_results(run: Run, n_questions: int, rng: random.Random) -> None:
    for system in SYSTEMS:
        rows = []
        for i in range(n_questions):
            for hop in (1, 2):
                values = {"recall": rng.choice((0.0, 0.5, 1.0)), "ap": rng.random()}
                ranking = tuple(f"d{rng.randrange(5000)}" for _ in range(6))
                rows.append(ScoredHop(f"q{i}", None, 0, hop, f"{system} {i}", "x", ranking, (1.0,) * 6, values))
        (run.eval / system).mkdir(parents=True)
        write_rows(run.eval / system / "per_question.parquet", rows, ["recall", "ap"])
    hop = {"hop": 2, "recall": 0.5, "ap": 0.5, "recall_ci": [0.4, 0.6], "ap_ci": [0.4, 0.6]}
    row = {"policy": None, "prompt": None, "n": n_questions, "failed": 0, "unparsed": 0, "seconds": 1.0, "lm_calls": 2}
    rows = [{"system": system, "kind": "base", **row, "hops": [hop]} for system in SYSTEMS]
    facts = {"n_questions": n_questions, "split": "test", "confidence": 0.95, "baseline": "base", "focus": "ipo"}
    summary = {"measures": ["recall", "ap"], "rows": rows, "comparisons": [], **facts}
    (run.eval / "summary.json").write_text(json.dumps(summary))


def memory(pid: int, what: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def viewing(path: Path) -> Iterator[tuple[int, str]]:
    """Run `leret view`; yield its process id and its URL."""
    command = [sys.executable, "-m", "leret", "view", str(path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().split(" at ")[1].split()[0]
    finally:
        process.terminate()
        process.wait()


def measure(run: Path, n_questions: int) -> None:
    began = time.perf_counter()
    with viewing(run) as (pid, url):
        urlopen(f"{url}questions").read()
        print(f"first list after {time.perf_counter() - began:.1f} s, {cpu_seconds(pid):.2f} s of CPU")
        for what in ("being indexed", "are being read"):
            while what in urlopen(f"{url}questions").read().decode():
                time.sleep(0.2)
            print(f"no more '{what}' after {time.perf_counter() - began:.1f} s")
        q, cpu = n_questions // 2, 0.0
        for path in (
            "", "questions", f"questions?page={n_questions // 50}", "questions?sort=spread&desc=1",
            "questions?search=w77+w2", "questions?min=0.4&max=0.6&spread=yes&failures=no", "questions?change=improved",
            "questions?change=worsened&sort=difference", "groups", "groups?reason=equal+rewards&sort=best",
            "pairs", "pairs?sort=margin&desc=1&page=1000", "coverage", "trainings", "prompts",
            f"q/q{q}", f"q/q{q}/q{q}-1", "q/q1",
        ):  # fmt: skip
            seconds, before = [], cpu_seconds(pid)
            for _ in range(TIMES):
                start = time.perf_counter()
                urlopen(url + path).read()
                seconds.append(time.perf_counter() - start)
                cpu = cpu_seconds(pid) - before if len(seconds) == 1 else cpu
            first, work, middle = (1000 * one for one in (seconds[0], cpu, statistics.median(seconds)))
            print(f"/{path:<50} first {first:4.0f} ms ({work:3.0f} ms CPU), median {middle:4.0f} ms")
        print(f"{cpu_seconds(pid):.0f} CPU-seconds in all; load {os.getloadavg()[0]:.1f}")
        print(f"resident {memory(pid, 'VmRSS'):.0f} MB, at most {memory(pid, 'VmHWM'):.0f} MB")


def follow(url: str, is_ready: Any) -> None:
    version = ""
    while True:
        if version != (version := urlopen(f"{url}live?path=/questions").read().decode()):
            urlopen(f"{url}questions").read()
        is_ready.set()
        time.sleep(1)


@contextmanager
def followed(path: Path) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    is_ready = context.Event()
    with viewing(path) as (pid, url):
        client = context.Process(target=follow, args=(url, is_ready))
        client.start()
        is_ready.wait()
        while "are being read" in urlopen(f"{url}questions").read().decode():
            time.sleep(0.2)
        before = cpu_seconds(pid)
        yield
        print(f"viewer: {cpu_seconds(pid) - before:.2f} s of CPU")
        client.terminate()
        client.join()


def measure_sampler(directory: Path, repetitions: int, n_questions: int) -> None:
    def recipe(limit: int) -> SamplingRecipe:
        changes = f"data.limit={limit}", "sampling.prompts=1", "sampling.samples=16"
        return load_recipe("sampling/demo", SamplingRecipe, changes)

    sample(recipe(5), Run.create(directory / "begun"))
    figures: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(-2, 2 * repetitions):  # the first two are not counted
        is_followed, run = number % 4 in (1, 2), directory / f"run-{number}"  # alone, followed, followed, alone
        shutil.copytree(directory / "begun", run)
        with followed(run) if is_followed else nullcontext():
            cpu, wall = time.process_time(), time.perf_counter()
            sample(recipe(n_questions), Run.open(run))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if number >= 0:
            figures[is_followed].append((cpu, wall))
        print(f"{number}, {'followed' if is_followed else 'alone'}: {cpu:.2f} s of CPU, {wall:.1f} s", flush=True)
    for i, what in enumerate(("CPU", "wall")):
        alone, on = (statistics.median(one[i] for one in figures[case]) for case in (False, True))
        print(f"{what}: {alone:.2f} s alone, {on:.2f} s followed, {on / alone - 1:+.1%} (medians)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=100_000)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--sampler", type=int, metavar="N")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.sampler:
            return measure_sampler(Path(name), options.sampler, 100)
        directory = options.run or Path(name)
        if not (directory / "run" / "eval").is_dir():
            directory.mkdir(exist_ok=True)
            rng = random.Random(0)
            run = write_run(directory, 8 * options.questions, rng, per_state=4)
            build_preferences(run)
            write_results(run, options.questions // 10, rng)
        measure(directory / "run", options.questions)


if __name__ == "__main__":
    main()
