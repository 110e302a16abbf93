"""Measure CPU, memory and disk per sample of a large job, in one process and with Ray (docs/how-to/scale.md).

    python benchmarks/cost/scaling.py [--questions 200] [--hops 4] [--workers 0 2]

Samples HotpotQA questions on the instant server with four prompts, including BM25 over the 29k documents. CPU-seconds
are per process, so other work on the machine changes them little. The preferences of all engines are compared byte by
byte. Prints Markdown. Needs HotpotQA's files (--data).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

from benchmarks.cost.sampling import DATA, Watch, endpoint, place, recipe_of
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.sampling.sharding import RayCluster
from leret.sampling.stage import sample
from leret.sampling.store.check import check_store


class Workers(threading.Thread):
    """Watches the processes of Ray's workers while they run."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self.run_directory = run
        self.seen: dict[int, tuple[float, float]] = {}
        self.over = False

    def run(self) -> None:
        """Last CPU-seconds and peak resident MB by process id."""
        while not self.over:
            file = self.run_directory.path / "events.jsonl"
            lines = file.read_text().split("\n")[:-1] if file.is_file() else ()
            for event in map(json.loads, lines):
                if event["event"] == "shard":
                    self.look(event["pid"])
            time.sleep(0.1)

    def look(self, pid: int) -> None:
        try:
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        peak = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)
        if peak:
            self.seen[pid] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), peak / 1024


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def four_hops(recipe: SamplingRecipe, hops: int) -> SamplingRecipe:
    value = recipe.model_dump(mode="json")
    value["program"]["hops"] = hops
    return SamplingRecipe.model_validate(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--hops", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2], help="0: one process without Ray")
    parser.add_argument("--adapter", default="chat")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.set_defaults(url=None, model="instant")
    arguments = parser.parse_args()
    print(f"{arguments.questions} questions, {arguments.hops} hops, 4 prompts, 1 sample, adapter {arguments.adapter}\n")
    print("| engine | samples | states | CPU-ms per sample, driver | workers | peak MB, driver | each worker "
          "| store, bytes per sample | preferences, bytes per pair | wall s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    preferences = set()
    with place() as work, endpoint(arguments) as url:
        recipe = four_hops(recipe_of(arguments, url, 1, work, limit=arguments.questions), arguments.hops)
        for n in arguments.workers:
            run = Run.create(work / f"run-{n}")
            watch, workers = Watch(), Workers(run)
            workers.start()
            with nullcontext() if not n else RayCluster(n) as cluster:
                report = sample(recipe, run, progress=watch, distribute=cluster)
            workers.over = True
            workers.join()
            store = check_store(run)
            assert not store.faults, store.faults
            parquet = run.preferences / "train.parquet"
            preferences.add(parquet.read_bytes())
            (wall, cpu, *_), (wall_end, cpu_end, *_) = watch.marks[0], watch.marks[-1]
            theirs = [1000 * used / report.samples for used, _ in workers.seen.values()]
            print(f"| {f'ray, {n} workers' if n else 'one process'} | {store.samples:,} | {store.states:,} "
                  f"| {1000 * (cpu_end - cpu) / store.samples:.2f} | {' + '.join(f'{used:.2f}' for used in theirs)} "
                  f"| {resident_mb():.0f} | {', '.join(f'{mb:.0f}' for _, mb in workers.seen.values())} "
                  f"| {store.bytes / store.samples:,.0f} | {parquet.stat().st_size / max(1, report.pairs):,.0f} "
                  f"| {wall_end - wall:.1f} |", flush=True)  # fmt: skip
            shutil.rmtree(run.path)
    print(f"\nThe preferences are {'the same bytes' if len(preferences) == 1 else 'NOT THE SAME'}.")
    sys.exit(len(preferences) != 1)


if __name__ == "__main__":
    main()
