"""Compare the mixers, and the rollout filter, at equal completions where two parts of a reward conflict.

    python benchmarks/algorithms/mixers.py --seeds 0 1 2 --out runs/bench/mixers

Policy `demo` rewrites a question of a generated world for BM25 (`pipelines/rewrite.py`). The reward's part ``recall@5``
grows with the words of a query, and its part ``brevity`` falls. GRPO trains a policy per mixer from the same weights,
with equal numbers of completions of the same questions. The table shows the parts on held-out questions, their mean,
its difference from mixer ``weights`` with a 95 % interval, and the share of the training's groups without spread.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from leret.config.evaluation import EvalRecipe
from leret.config.sampling import MIXER_SHELF, SamplingRecipe
from leret.core.runs import Run
from leret.core.types import Outcome
from leret.evaluation.stage import evaluate
from leret.evaluation.statistics import bootstrap_intervals
from leret.sampling.stage import sample
from leret.training.algorithms import TrainingRecipe
from leret.training.stage import train

ROUNDS = {"max_steps": 75, "questions_per_round": 4, "num_generations": 8, "learning_rate": 2e-3, "logging_steps": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"mixer": name} for name in ("weights", *MIXER_SHELF) if name != "factors"},
    "weights-above": {"mixer": "weights", "engine": "keep-rollouts", "keep_rollouts": "above"},
    "weights-either": {"mixer": "weights", "engine": "keep-rollouts", "keep_rollouts": "either"},
}
BREVITY = f"{__file__}:brevity"


def brevity(outcome: Outcome) -> float:
    """Return 1 for an empty query, less 1/16 per word."""
    return 1 - len(str(outcome.outputs.get("query", "")).split()) / 16


def recipe(seed: int) -> SamplingRecipe:
    return SamplingRecipe.model_validate({
        "data": {"kind": "world", "seed": seed, "split": "train", "limit": 300, "options": {"comparison": 0.75}},
        "retriever": {"kind": "bm25", "k": 5},
        "policy": {"kind": "local", "model": "demo", "max_tokens": 16},
        "program": {"path": "pipelines/rewrite.py:Rewrite", "k": 5, "adapter": {"kind": "compact"}},
        "sampling": {"prompts": 1, "samples": 2, "seed": seed, "reward": "recall@5"},
    })  # fmt: skip


def trained(run: Run, seed: int) -> dict[str, float]:
    """Train the missing policies; return the mean share of groups without spread, by policy."""
    shares = {}
    for name, variant in VARIANTS.items():
        keys = dict(variant)
        reward = {"parts": {"recall@5": 1.0, "brevity": {"function": BREVITY}}, "mixer": keys.pop("mixer")}
        named = {"name": name, "init_from": "base", "seed": seed, "reward": reward}
        train(TrainingRecipe.model_validate({"algorithm": "grpo", **named, **ROUNDS, **keys}), run)
        log = json.loads((run.policies / name / "training.json").read_text())["log_history"]
        shares[name] = float(np.mean([entry["frac_reward_zero_std"] for entry in log]))
    return shares


def values(run: Run, system: str) -> np.ndarray:
    """Return the two parts by question, (n_questions, 2)."""
    rows = pq.read_table(run.eval / system / "per_question.parquet").to_pylist()
    rows.sort(key=lambda row: row["question_id"])
    return np.array([[row["recall@5"], row[BREVITY]] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/mixers"))
    options = parser.parse_args()
    print("| seed | mixer | recall@5 | words | mean of the parts | to weights (95 %) | groups without spread |")
    print("|---|---|---|---|---|---|---|")
    for seed in options.seeds:
        run = Run.create(options.out / f"seed-{seed}")
        sample(recipe(seed), run)
        shares = trained(run, seed)
        measures = {"measures": ["recall@5", BREVITY], "limit": options.test}
        evaluate(EvalRecipe.model_validate({"systems": ["raw-question", "base", "policies"], **measures}), run)
        control = values(run, "weights").mean(1)
        for name in ("raw-question", "base", *VARIANTS):
            parts = values(run, name)
            difference = parts.mean(1) - control
            low, high = bootstrap_intervals(difference[:, None])[0]
            means = f"{parts[:, 0].mean():.3f} | {16 * (1 - parts[:, 1].mean()):.1f} | {parts.mean():.3f}"
            ahead = "" if name == "weights" else f"{difference.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
            print(f"| {seed} | {name} | {means} | {ahead} | {shares.get(name, float('nan')):.2f} |", flush=True)


if __name__ == "__main__":
    main()
