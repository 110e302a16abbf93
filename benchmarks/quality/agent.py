"""Train the agent of `leret run agentic-rag` on several seeds; compare it with the untrained agent and raw question.

    python benchmarks/quality/agent.py --seeds 0 1 2 --out runs/bench/agent [--set train.limit=96 ...]

Each seed has its own world, sampling and training. The raw question is one search; for its answer, the untrained policy
reads the passages. Differences are those of the trained agent on held-out questions, with 95 % intervals (paired
bootstrap). CPU-minutes count the whole `leret run`, including its evaluation. Finished runs are kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import dspy
import numpy as np
import pyarrow.parquet as pq
from dspy.utils.exceptions import AdapterParseError

import leret
from leret.core.runs import Run
from leret.evaluation.statistics import bootstrap_intervals
from leret.rewards.answers import token_f1
from leret.rollouts.environment import Environment


def cpu_minutes(path: Path, seed: int, keys: list[str]) -> float:
    keys = [*keys, *(f"{section}.seed={seed}" for section in ("data", "sampling", "train"))]
    command = [sys.executable, "-m", "leret", "run", "agentic-rag", "--run", str(path)]
    command += [part for key in keys for part in ("--set", key)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}; run it by hand to see why")
    return (usage.ru_utime + usage.ru_stime) / 60


def last_hops(run: Run, system: str, measure: str) -> dict[str, float]:
    """Return a measure after the last hop, by question."""
    rows = pq.read_table(run.eval / system / "per_question.parquet").to_pylist()
    return {row["question_id"]: row[measure] for row in sorted(rows, key=lambda row: row["hop"])}


def raw_answers(run: Run, ids: set[str]) -> dict[str, float]:
    """Return F1 of the untrained policy's answers from the passages of one search with the question."""
    scores = {}
    with Environment.open(run) as environment:
        tasks = [task for task in environment.tasks("test", None) if task.id in ids]
        extract, settings = environment.program().agent.extract, environment.recipe.policy
        lm = leret.LM(settings.model, max_tokens=settings.max_tokens, temperature=0.0)
        adapter, k = environment.adapter, environment.recipe.retriever.k
        rankings = environment.retriever.search([task.text for task in tasks], k)
        for task, ranking in zip(tasks, rankings, strict=True):
            seen = {"tool_name_0": "search", "tool_args_0": {"query": task.text}}
            seen |= {"observation_0": [f"{p.title} | {p.text}" for p in ranking]}
            seen |= {"tool_name_1": "finish", "tool_args_1": {}, "observation_1": "Completed."}
            shown = adapter.format_user_message_content(dspy.Signature(f"{', '.join(seen)} -> answer"), seen)
            try:
                with dspy.context(lm=lm, adapter=adapter):
                    answer = extract(question=task.text, trajectory=shown).answer
            except AdapterParseError:
                answer = ""
            scores[task.id] = max(token_f1(answer, reference) for reference in task.answers)
    return scores


def difference(a: dict[str, float], b: dict[str, float]) -> str:
    values = np.array([a[name] - b[name] for name in a])
    low, high = bootstrap_intervals(values[:, None])[0]
    return f"{values.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/agent"))
    parser.add_argument("--set", action="append", default=[], dest="keys")
    options = parser.parse_args()
    print("| seed | measure | raw question | before | after | to before (95 %) | to the raw question (95 %) |")
    print("|---|---|---|---|---|---|---|")
    for seed in options.seeds:
        minutes = cpu_minutes(options.out / f"seed-{seed}", seed, options.keys)
        run = Run.open(options.out / f"seed-{seed}")
        for name, label in (("rr", "MRR"), ("f1", "answer F1"), ("recall", "recall")):
            before, after = last_hops(run, "base", name), last_hops(run, "grpo", name)
            raw = raw_answers(run, set(after)) if name == "f1" else last_hops(run, "raw-question", name)
            means = " | ".join(f"{np.mean(list(one.values())):.3f}" for one in (raw, before, after))
            print(
                f"| {seed} | {label} | {means} | {difference(after, before)} | {difference(after, raw)} |", flush=True
            )
        parsed = " | ".join(f"{np.mean(list(last_hops(run, one, 'format').values())):.3f}" for one in ("base", "grpo"))
        print(f"| {seed} | format | | {parsed} | | |")
        print(f"| {seed} | CPU-minutes | | | {minutes:.1f} | | |", flush=True)


if __name__ == "__main__":
    main()
