"""Make the table "Small models that search": SmolLM2-135M-Instruct before and after training, on held-out questions.

    make smollm2
    python benchmarks/quality/small_models.py WORK --data DIR [--rows add rewrite] [--seeds 0 1] [--jobs N] [--set K=V]

Runs `sampling/smollm2-hotpotqa.yaml` (`add`) and `sampling/smollm2-rewrite.yaml` (`rewrite`) for each seed, ``--jobs``
at a time, each in WORK/ROW-SEED with its log. ``--data`` is the folder of queries_all.jsonl.gz and corpus.jsonl.gz.
Finished stages are kept. Only the first seed's run evaluates the untrained model, because its greedy queries do not
depend on the seed. Prints recall, AP and all gold found after the last search, paired differences to the raw question
and to the untrained model with 95 % intervals, and what each row cost.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from leret.evaluation.statistics import bootstrap_intervals

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {"add": "sampling/smollm2-hotpotqa.yaml", "rewrite": "sampling/smollm2-rewrite.yaml"}


def run_row(job: tuple[str, int], work: Path, data: Path, sets: Sequence[str], threads: int, first: int) -> str:
    """Run a row's recipe from sampling to evaluation; return what happened, with wall seconds."""
    row, seed = job
    out = work / f"{row}-{seed}"
    out.mkdir(parents=True, exist_ok=True)
    keys = [f"data.questions={data / 'queries_all.jsonl.gz'}", f"data.corpus={data / 'corpus.jsonl.gz'}"]
    keys += [f"sampling.seed={seed}", f"seed={seed}", *sets]
    if seed != first:
        keys.append("eval.systems=[raw-question, policies]")
    command = [sys.executable, "-m", "leret", "run", RECIPES[row], "--run", str(out / "run")]
    for key in keys:
        command += ["--set", key]
    start = time.perf_counter()
    with (out / "log").open("a") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment, check=False)
    return f"{row}-{seed}: exit {done.returncode}, {time.perf_counter() - start:.0f} s"


def figures(run: Path, first: Path) -> Iterator[tuple[str, Mapping[str, Any], dict[str, str]]]:
    """Yield each system of a run with its row of summary.json and its paired differences in recall.

    The untrained model's results are those of the run ``first``.
    """
    summary = json.loads((run / "eval/summary.json").read_text(encoding="utf-8"))
    recalls = {"base": last_recall(first / "eval/base")} if (first / "eval/base").is_dir() else {}
    recalls.update({row["system"]: last_recall(run / "eval" / row["system"]) for row in summary["rows"]})
    for row in summary["rows"]:
        against = {}
        for name in ("raw-question", "base"):
            if name in recalls and name != row["system"]:
                against[name] = difference(recalls[row["system"]], recalls[name])
        yield row["system"], row, against


def last_recall(folder: Path) -> dict[str, float]:
    """Return each question's recall after its last search."""
    table = pq.read_table(folder / "per_question.parquet", columns=["question_id", "hop", "recall"]).to_pylist()
    return {row["question_id"]: row["recall"] for row in sorted(table, key=lambda row: row["hop"])}


def difference(a: Mapping[str, float], b: Mapping[str, float]) -> str:
    """Return the mean paired difference with its 95 % interval."""
    column = np.array([[a[question] - b[question]] for question in sorted(a.keys() & b.keys())])
    low, high = bootstrap_intervals(column)[0]
    return f"{column.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def cost(run: Path) -> str:
    """Return the seconds of each stage in the run's log of events."""
    seconds: dict[str, float] = {}
    for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if "seconds" in event:
            name = str(event.get("policy") or event["stage"])
            seconds[name] = seconds.get(name, 0.0) + float(event["seconds"])
    return ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())


def table(work: Path, jobs: Sequence[tuple[str, int]]) -> None:
    """Print Markdown for the finished rows."""
    print("| run | system | recall | AP | all gold | minus raw question | minus base |\n|---|---|---|---|---|---|---|")
    finished = [job for job in jobs if (work / f"{job[0]}-{job[1]}" / "run/eval/summary.json").is_file()]
    for row, seed in finished:
        for system, values, against in figures(work / f"{row}-{seed}/run", work / f"{row}-{jobs[0][1]}/run"):
            last = values["hops"][-1]
            numbers = " | ".join(f"{last[name]:.3f}" for name in ("recall", "ap", "all_found"))
            pairs = " | ".join(against.get(name, "") for name in ("raw-question", "base"))
            print(f"| {row}-{seed} | {system} | {numbers} | {pairs} |")
    for row, seed in finished:
        print(f"{row}-{seed}: {cost(work / f'{row}-{seed}' / 'run')}")


def main() -> None:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each run")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for every run")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    jobs = [(row, seed) for row in arguments.rows for seed in arguments.seeds]
    shared = {"data": arguments.data.resolve(), "sets": arguments.set, "threads": arguments.threads}
    run = partial(run_row, work=work, first=arguments.seeds[0], **shared)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(run, jobs):
            print(line, flush=True)
    table(work, jobs)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{(used.ru_utime + used.ru_stime) / 60:.1f} CPU-minutes")


if __name__ == "__main__":
    main()
