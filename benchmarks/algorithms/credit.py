"""Compare question groups (GRPO as in papers) with state groups of each credit, at equal completions and tokens.

    python benchmarks/algorithms/credit.py train OUT --seeds 0 1 2        # an agent with a search tool, policy `agent`
    python benchmarks/algorithms/credit.py train OUT --program multihop   # two searches, policy `demo`
    python benchmarks/algorithms/credit.py table OUT                      # tables of the runs in OUT

Every arm trains the same policy with GRPO on the same world, 8 completions (or rollouts) per group, and about as many
completions per round. The score of held-out questions (split dev, greedy) is taken before training and at regular
rounds: recall of the gold documents for `multihop`; for the agent, the mean of recall and exact match of the answer.
The tables interpolate these curves at equal numbers of sampled completions and of their tokens, continuations included.
After training, the policy of each arm's best round is measured on 200 questions of the split test.

OUT is a directory for the runs. Finished arms are kept, so a command can be stopped and repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from leret.config.evaluation import EvalRecipe
from leret.config.load import load_recipe
from leret.core.runs import Run
from leret.core.types import Outcome
from leret.evaluation.stage import evaluate
from leret.rewards import REWARDS

HERE = Path(__file__).resolve()
AGENT = {
    "program": {
        "path": f"{HERE.parents[1] / 'quality/optimizer.py'}:React",
        "adapter": {"kind": "compact", "outputs": True},
    },
    "policy": {"kind": "local", "model": "agent", "temperature": 1.0, "max_tokens": 96},
    "sampling": {"reward": "recall", "final": f"{HERE}:score"},
}
MULTIHOP = {
    "program": {"path": "pipelines/multihop.py:MultiHop", "hops": 2, "adapter": {"kind": "compact"}},
    "policy": {"kind": "local", "model": "demo", "temperature": 1.0, "max_tokens": 16},
    "sampling": {"reward": "recall", "final": "recall"},
}


class Setup(NamedTuple):
    """A sampling recipe, learning rate, measures for dev and test, and (questions per round, rounds) of each arm."""

    recipe: dict[str, Any]
    rate: float
    measure: str
    measures: list[str]
    rounds: dict[str, tuple[int, int]]


SETUPS = {
    "agent": Setup(
        AGENT, 1e-3, f"{HERE}:score", ["recall", "em", "f1"],
        {"question": (4, 16), "step": (4, 16), "final": (2, 13), "both": (2, 13)},
    ),
    "multihop": Setup(
        MULTIHOP, 2e-3, "recall", ["recall", "ap"],
        {"question": (8, 40), "step": (8, 40), "final": (5, 40), "both": (5, 40)},
    ),
}  # fmt: skip
ARMS = {
    "question": {"groups": "question"},
    **{credit: {"credit": credit} for credit in ("step", "final", "both")},
}


def score(outcome: Outcome) -> float | None:
    """Return the mean of recall and the exact match of the answer."""
    recall, em = REWARDS["recall"](outcome), REWARDS["em"](outcome)
    return None if em is None or recall is None else (recall + em) / 2


def leret(*words: str) -> None:
    process = [sys.executable, "-m", "leret", *words]
    done = subprocess.run(
        process, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"leret {' '.join(words)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")


def prepared(setup: Setup, path: Path, seed: int) -> Run:
    """Return a run with two samples per state; training reads only its recipe and its tasks."""
    if not (path / "sample.done").is_file():
        settings = {**setup.recipe["sampling"], "prompts": 1, "samples": 2, "credit": "step", "seed": seed}
        data = {"kind": "world", "seed": seed, "split": "train", "limit": 8}
        recipe = {**setup.recipe, "data": data, "retriever": {"kind": "bm25", "k": 3}, "sampling": settings}
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.parent / f"{path.name}.yaml"
        file.write_text(yaml.safe_dump(recipe))
        leret("sample", str(file), "--run", str(path))
    return Run.open(path)


def train(name: str, out: Path, seeds: list[int], arms: list[str], rate: float | None) -> None:
    setup = SETUPS[name]
    for seed in seeds:
        run = prepared(setup, out / f"{name}-{seed}", seed)
        for arm in arms:
            if (run.policies / arm).is_dir():
                continue
            questions, rounds = setup.rounds[arm]
            keys = {
                "name": arm, "init_from": "base", "limit": 400, "seed": seed,
                "learning_rate": rate or setup.rate, "warmup_ratio": 0.0,
                "lr_scheduler_type": "constant", "questions_per_round": questions, "max_steps": rounds,
                "num_generations": 8, "logging_steps": 1, "save_steps": 1000, "eval_steps": rounds // 4,
                "eval_tasks": 80, "metric_for_best_model": setup.measure, **ARMS[arm],
            }  # fmt: skip
            words = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]
            leret("train", "training/grpo.yaml", "--run", str(run.path), *words)
            print(f"{name} seed {seed}: {arm} trained", flush=True)


def curve(run: Run, arm: str) -> dict[str, np.ndarray]:
    """Return the completions, their tokens and the score at each validation; the first is the untrained policy."""
    log = json.loads((run.policies / arm / "training.json").read_text())["log_history"]
    totals, rows = {"completions": 0.0, "tokens": 0.0}, []
    for entry in log:
        totals["completions"] += entry.get("num_completions", 0)
        totals["tokens"] += entry.get("num_completion_tokens", 0)
        rows += [
            {**totals, "score": value}
            for key, value in entry.items()
            if key.startswith("eval_") and key != "eval_unparsed"
        ]
    return {key: np.array([row[key] for row in rows]) for key in ("completions", "tokens", "score")}


def print_tables(out: Path) -> None:
    for name in SETUPS:
        runs = [Run.open(path) for path in sorted(out.glob(f"{name}-?")) if (path / "sample.done").is_file()]
        curves = {
            (run.path.name, arm): curve(run, arm) for run in runs for arm in ARMS if (run.policies / arm).is_dir()
        }
        for unit in ("completions", "tokens") if curves else ():
            print_curves(name, unit, curves)
        for run in runs:
            print_test(name, run, [arm for arm in ARMS if (run.path.name, arm) in curves])


def print_curves(name: str, unit: str, curves: dict[tuple[str, str], dict[str, np.ndarray]]) -> None:
    """Print each arm's score at equal amounts of a unit, up to the amount that all arms reached."""
    end = min(one[unit][-1] for one in curves.values())
    points = end * np.array([0, 1 / 4, 1 / 2, 3 / 4, 1])
    print(f"\n| {name}: {unit} | {' | '.join(f'{point:,.0f}' for point in points)} |")
    print("|---" * 6 + "|")
    for (run, arm), one in curves.items():
        values = np.interp(points, one[unit], one["score"])
        print(f"| {arm}, seed {run[-1]} | {' | '.join(f'{value:.3f}' for value in values)} |")


def print_test(name: str, run: Run, arms: list[str]) -> None:
    measures = SETUPS[name].measures
    keys = [
        f"systems={json.dumps(['base', *arms])}",
        f"measures={json.dumps(measures)}",
        f"baseline={arms[0]}",
        "limit=200",
        "choose_on=null",
    ]
    summary = evaluate(load_recipe("eval/demo.yaml", EvalRecipe, keys), run).summary
    print(f"\n| {run.path.name}, split test | {' | '.join(measures)} |\n{'|---' * (len(measures) + 1)}|")
    for row in summary["rows"]:
        values = {**row["hops"][-1], **(row["answer"] or {})}
        print(f"| {row['system']} | {' | '.join(f'{values[one]:.3f}' for one in measures)} |", flush=True)
    print(f"\n| system | measure | difference from {arms[0]} (95 % interval) |\n|---|---|---|")
    for one in summary["comparisons"]:
        if one["b"] == arms[0] and one["measure"] in measures:
            low, high = one["ci"]
            print(f"| {one['a']} | {one['measure']} | {one['difference']:+.3f} [{low:+.3f}, {high:+.3f}] |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "table"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--program", choices=list(SETUPS), default="agent")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["question", "step", "final", "both"])
    parser.add_argument("--rate", type=float, help="learning rate; default: that of the program")
    given = parser.parse_args()
    if given.what == "table":
        print_tables(given.out)
    else:
        train(given.program, given.out, given.seeds, given.arms, given.rate)


if __name__ == "__main__":
    main()
