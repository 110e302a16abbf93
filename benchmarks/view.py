"""Measure the latency and the memory of `leret view` for a run of 100,000 questions and 800,000 samples.

Command: python benchmarks/view.py [--questions 100000] [--run DIR]

Writes a run with invented samples (two steps, four samples per state), results of two systems for a tenth of the
questions, and pairs; --run keeps it for another measurement. Requests go one after another, each page 20 times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from rescore import write_run

from leret.core.runs import Run
from leret.evaluation.results import ScoredHop, write_rows
from leret.sampling.preferences.dataset import build_preferences

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


def measure(run: Run, n_questions: int) -> None:
    began = time.perf_counter()
    command = [sys.executable, "-m", "leret", "view", str(run.path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].split()[0]
        urlopen(f"{url}questions").read()
        print(f"first list after {time.perf_counter() - began:.1f} s")
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
            seconds, before = [], cpu_seconds(process.pid)
            for _ in range(TIMES):
                start = time.perf_counter()
                urlopen(url + path).read()
                seconds.append(time.perf_counter() - start)
                cpu = cpu_seconds(process.pid) - before if len(seconds) == 1 else cpu
            first, work, middle = (1000 * one for one in (seconds[0], cpu, statistics.median(seconds)))
            print(f"/{path:<50} first {first:4.0f} ms ({work:3.0f} ms CPU), median {middle:4.0f} ms")
        print(f"{cpu_seconds(process.pid):.0f} CPU-seconds in all; load {os.getloadavg()[0]:.1f}")
        print(f"resident {memory(process.pid, 'VmRSS'):.0f} MB, at most {memory(process.pid, 'VmHWM'):.0f} MB")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=100_000)
    parser.add_argument("--run", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = options.run or Path(name)
        if not (directory / "run" / "eval").is_dir():
            directory.mkdir(exist_ok=True)
            rng = random.Random(0)
            run = write_run(directory, 8 * options.questions, rng, per_state=4)
            build_preferences(run)
            write_results(run, options.questions // 10, rng)
        measure(Run.open(directory / "run"), options.questions)


if __name__ == "__main__":
    main()
