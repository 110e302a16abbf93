"""Compare joint training of a picker and a writer with other trainings, on held-out dialogues of the persona world.

    python benchmarks/quality/dialogue.py --seeds 0 1 2 --arms joint writer alternating beta reinforce

Every arm starts from the SFT policy of `sampling/dialogue.yaml`. `writer` is GRPO of the writer alone, with as many
replies per turn as `joint` and the untrained picker. `alternating` trains the picker with the SFT writer, then the
writer with that picker. `beta` is joint training with `beta: 10` for both. `reinforce` trains the writer with the
reward itself as the advantage.
The table shows F1, the share of turns with the right story (recall) and the completions that an arm sampled (picks
included; of `alternating`, only those of the writer's training); differences have paired 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from leret.config.evaluation import EvalRecipe
from leret.config.load import load_all
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.evaluation.stage import evaluate
from leret.evaluation.statistics import bootstrap_intervals
from leret.sampling.stage import sample
from leret.training.algorithms import ALGORITHMS
from leret.training.picks.pick import PickRecipe
from leret.training.rounds.algorithm import Objective, RoundAlgorithm
from leret.training.rounds.algorithm import writer as make_writer
from leret.training.rounds.grpo import GRPORecipe, loss
from leret.training.stage import train

RECIPE = "sampling/dialogue.yaml"
Replies = dict[str, float]


def reward_itself(recipe: Any, sampled: Any, batch: Any, beta: float) -> Any:
    """Return the batch with each completion's reward as its advantage: REINFORCE without a baseline."""
    from dataclasses import replace

    return replace(batch, advantages=sampled.rewards.to(batch.mask)[:, None] * batch.mask)


def train_arms(run: Run, seed: int, arms: list[str], smaller: list[str]) -> None:
    sampling, sft, joint, _ = recipes(seed, smaller)
    sample(sampling, run)
    train(sft, run)
    shared = {key: getattr(joint, key) for key in ("questions_per_round", "num_train_epochs", "logging_steps", "seed")}
    keys = joint.writer.model_dump(include={"learning_rate", "init_from"}) | shared
    n = joint.picker.num_generations * joint.writer.num_generations
    writer = GRPORecipe(name="writer", num_generations=n, **keys)
    if "joint" in arms:
        train(joint, run)
    if "writer" in arms:
        train(writer, run)
    if "beta" in arms:
        held = [getattr(joint, name).model_copy(update={"beta": 10.0}) for name in ("picker", "writer")]
        train(joint.model_copy(update={"name": "beta", "picker": held[0], "writer": held[1]}), run)
    if "reinforce" in arms:
        ALGORITHMS["grpo"] = RoundAlgorithm(
            GRPORecipe, Objective(reward_itself, loss), make_writer, lambda _: "REINFORCE"
        )
        train(writer.model_copy(update={"name": "reinforce", "num_generations": 4, "learning_rate": 5e-3}), run)


def alternate(run: Run, seed: int, smaller: list[str]) -> Path:
    """Train the picker against the SFT writer and then the writer with that picker; return the last run."""
    sampling, _, joint, _ = recipes(seed, smaller)
    policies, out = {"": str(run.policies / "sft"), "pick": "scratch"}, run
    for name in ("pick", "writer"):
        out = Run.create(run.path.parent / f"{run.path.name}-{name}")
        picker = sampling.policies["pick"].model_copy(update={"model": policies["pick"]})
        few = sampling.data.model_copy(update={"limit": joint.limit or sampling.data.limit})
        policy = sampling.policy.model_copy(update={"model": policies[""]})
        sample(sampling.model_copy(update={"policy": policy, "policies": {"pick": picker}, "data": few}), out)
        shared = {
            key: getattr(joint, key) for key in ("questions_per_round", "num_train_epochs", "logging_steps", "seed")
        }
        if name == "pick":
            keys = joint.picker.model_dump(include={"num_generations", "learning_rate", "entropy_coef"})
            train(PickRecipe(**keys, **shared), out)
            policies["pick"] = str(out.policies / "pick")
        else:
            n = joint.picker.num_generations * joint.writer.num_generations
            rate = joint.writer.learning_rate
            train(GRPORecipe(name="alternating", num_generations=n, learning_rate=rate, **shared), out)
    return out.path


def recipes(seed: int, smaller: list[str]) -> tuple[SamplingRecipe, Any, Any, EvalRecipe]:
    overrides = [f"data.seed={seed}", f"sampling.seed={seed}", f"train.seed={seed}", *smaller]
    sampling, sft, joint, evaluation = load_all([RECIPE], overrides)
    return sampling, sft, joint, evaluation  # type: ignore[return-value]


def scores(run: Run, evaluation: EvalRecipe) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    evaluate(evaluation, run)
    tables = {path.parent.name: pq.read_table(path).to_pandas() for path in run.eval.glob("*/per_question.parquet")}
    return {
        name: {
            m: table.sort_values("question_id").groupby("question_id").last()[m].to_numpy() for m in ("f1", "recall")
        }
        for name, table in tables.items()
    }


def replies(directory: Path) -> float:
    """Return the number of completions sampled in training, picks included; log entries are means over rounds."""
    record = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    n = sum(entry.get("num_completions", 0.0) for entry in record["log_history"])
    return float(n * record["key"]["recipe"]["logging_steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", default=["joint", "writer"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="override of the recipe, as in leret run")
    parsed = parser.parse_args()
    for seed in parsed.seeds:
        began, run = time.process_time(), Run.create(parsed.out / f"seed{seed}")
        train_arms(run, seed, parsed.arms, parsed.set)
        values = scores(run, recipes(seed, parsed.set)[3])
        directories = {path.parent.name: path.parent for path in run.policies.glob("*/training.json")}
        if "alternating" in parsed.arms:
            last = Run.open(alternate(run, seed, parsed.set))
            other = scores(last, recipes(seed, parsed.set)[3])
            values["alternating"] = other["alternating"]
            directories["alternating"] = last.policies / "alternating"
        print(f"seed {seed}: {time.process_time() - began:.0f} CPU-seconds")
        for name, value in values.items():
            row = f"{name:12} f1 {value['f1'].mean():.3f}  right story {value['recall'].mean():.3f}"
            print(row, f" completions {replies(directories[name]):,.0f}" if name in directories else "")
        pairs = [("joint", "sft"), ("writer", "sft"), ("joint", "writer"), ("joint", "alternating")]
        for one, other in (pair for pair in pairs if set(pair) <= values.keys()):
            for measure in ("f1", "recall"):
                difference = values[one][measure] - values[other][measure]
                low, high = bootstrap_intervals(difference[:, None])[0]
                print(f"{one} - {other}, {measure}: {difference.mean():+.3f} [{low:+.3f}, {high:+.3f}]", flush=True)


if __name__ == "__main__":
    main()
