"""Distillation: from a trained teacher, and from the policy itself with hints.

    python benchmarks/algorithms/distill.py teacher RUNS [--world 0] [--seeds 0,1,2] [--split test]
    python benchmarks/algorithms/distill.py hints RUNS [--world 0] [--seeds 0,1,2] [--split test]
    python benchmarks/algorithms/distill.py smollm2 RUNS --data DATA [--seeds 0,1,2] [--split test]

``teacher`` trains grpo from base (9,600 completions), then a student from base with a quarter of them and four updates
per round. The controls are grpo on a quarter, with one and with four updates per round. It prints recall after the last
hop, and the share of the teacher's gain.

``hints`` draws 2,400 completions from base without hints and 2,400 of which half were written with hints, trains sft on
each, and on as many fresh ones a student that is its own teacher with hints, and the controls. All are compared with
sft without hints.

``smollm2`` compares with SmolLM2-135M-Instruct (policies/smollm2), HotpotQA in DATA and LeReT's program: sft on 192
targets from about 960 completions, with and without hints, and 16 rounds of at most 64 completions of grpo and of
distill with hints, both from base. It prints recall and AP on 200 questions, and differences to sft without hints.

RUNS is a directory for the runs. Finished runs and policies are kept, so a command can be stopped and repeated. Tune
with ``--world 1 --split dev``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.algorithms.online import Bench, leret, measured
from leret.core.runs import Run

ROUND = {"questions_per_round": 4, "num_generations": 8, "max_completion_length": 16, "warmup_ratio": 0.0}  # 64 each
WIDE = {  # 38 rounds of 64 completions at 16 states, and four updates on each round
    **ROUND,
    "questions_per_round": 8,
    "num_generations": 4,
    "num_iterations": 4,
    "max_steps": 152,
}
QUIET = {"logging_steps": 5, "save_steps": 1000}
TEACHER = {"grpo": ("demo-grpo", {**ROUND, "init_from": "base", "max_steps": 150, "learning_rate": 4e-3})}
QUARTER = {**ROUND, "init_from": "base", "learning_rate": 4e-3}
CONTROL: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo-quarter": ("demo-grpo", {**QUARTER, "max_steps": 37}),
    "grpo-quarter-4": ("demo-grpo", {**QUARTER, "num_iterations": 4, "max_steps": 148}),
}
STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "distill": ("distill", {**WIDE, "teacher": "grpo", "learning_rate": 4e-3}),
    **CONTROL,
}
SFT = {"sft": ("demo-sft", {})}
SELF = {
    "self-masked": (
        "distill",
        {**ROUND, "teacher": "self", "hint": "gold", "mask": "reward", "max_steps": 37, "learning_rate": 4e-3},
    ),
}
PLAIN = ("sampling.prompts=1", "sampling.samples=2")
HINTED = ("sampling.prompts=2", "sampling.samples=1", "sampling.hint=gold")

LM_SFT: tuple[str, dict[str, Any]] = (
    "sft",
    {"max_steps": 12, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 5e-5},
)
LM_ROUND = {
    "init_from": "base",
    "questions_per_round": 4,
    "num_generations": 8,
    "max_steps": 16,
    "learning_rate": 4e-5,
    "per_device_train_batch_size": 16,
}
LM_SELF = {**LM_ROUND, "teacher": "self", "hint": "gold"}
LM_ONLINE: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", LM_ROUND),
    "self": ("distill", LM_SELF),
    "self-masked": ("distill", {**LM_SELF, "mask": "reward"}),
}
LM_HINTED = ("sampling.prompts=2", "sampling.samples=4", "sampling.hint=gold")


def sampled(path: Path, recipe: str, *keys: str) -> Run:
    """Return a run, sampled if missing."""
    if not (path / "sample.done").is_file():
        leret(
            "sample", f"sampling/{recipe}.yaml", "--run", str(path), *(word for key in keys for word in ("--set", key))
        )
    return Run.open(path)


def world_keys(world: int, seed: int) -> tuple[str, ...]:
    return f"data.seed={world}", f"sampling.seed={seed}"


def hotpotqa_keys(data: Path, seed: int) -> tuple[str, ...]:
    questions, corpus = data / "queries_all.jsonl.gz", data / "corpus.jsonl.gz"
    return f"data.questions={questions}", f"data.corpus={corpus}", "data.limit=60", f"sampling.seed={seed}"


def trained(run: Run, policies: Mapping[str, tuple[str, dict[str, Any]]], seed: int) -> list[str]:
    """Train the policies that the run lacks; return their names."""
    for name, (recipe, keys) in policies.items():
        if not (run.policies / name).is_dir():
            given = {**QUIET, **keys, "name": name, "seed": seed}
            words = [word for key, value in given.items() for word in ("--set", f"{key}={json.dumps(value)}")]
            leret("train", f"training/{recipe}.yaml", "--run", str(run.path), *words)
    return list(policies)


def n_completions(run: Run, name: str) -> int:
    return int(json.loads((run.policies / name / "training.json").read_text())["examples"])


def teacher(runs: Path, world: int, seed: int, split: str) -> None:
    run = sampled(runs / f"world-{world}-{seed}", "demo", *world_keys(world, seed), *PLAIN)
    names = trained(run, {**TEACHER, **STUDENTS}, seed)
    found = measured(Bench(), run, ["base", *names], split, "grpo")
    base, best = found["base"]["recall"], found["grpo"]["recall"]
    for name, row in found.items():
        n = n_completions(run, name) if name != "base" else 0
        share = (row["recall"] - base) / (best - base)
        ahead = row.get("ahead", "")
        print(f"| {seed} | {name} | {n:,} | {row['recall']:.3f} | {share:.0%} | {ahead} |", flush=True)


def hints(runs: Path, world: int, seed: int, split: str) -> None:
    plain = sampled(runs / f"world-{world}-{seed}", "demo", *world_keys(world, seed), *PLAIN)
    hinted = sampled(runs / f"hinted-{world}-{seed}", "demo", *world_keys(world, seed), *HINTED)
    online = trained(plain, {**SFT, **SELF, **CONTROL}, seed)
    trained(hinted, SFT, seed)
    link(hinted, "sft", plain, "sft-hinted")
    show(seed, measured(Bench(), plain, ["base", *online, "sft-hinted"], split, "sft"))


def link(other: Run, policy: str, plain: Run, name: str) -> None:
    """Let the plain run evaluate a policy of another run under a name."""
    copy = plain.policies / name
    if not copy.is_symlink():
        copy.symlink_to((other.policies / policy).resolve())


def show(seed: int, found: Mapping[str, Mapping[str, Any]]) -> None:
    for name, row in found.items():
        print(f"| {seed} | {name} | {row['recall']:.3f} | {row['ap']:.3f} | {row.get('ahead', '')} |", flush=True)


def smollm2(runs: Path, data: Path, seed: int, split: str) -> None:
    keys = hotpotqa_keys(data, seed)
    plain = sampled(runs / f"plain-{seed}", "smollm2-rewrite", *keys)
    hinted = sampled(runs / f"hinted-{seed}", "smollm2-rewrite", *keys, *LM_HINTED)
    online = trained(plain, {"sft": LM_SFT, **LM_ONLINE}, seed)
    trained(hinted, {"sft": LM_SFT}, seed)
    link(hinted, "sft", plain, "sft-hinted")
    names = ["raw-question", "base", *online, "sft-hinted"]
    bench = Bench(recipes=("", "", "eval/hotpotqa.yaml"))
    show(seed, measured(bench, plain, names, split, "sft", "limit=200"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["teacher", "hints", "smollm2"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--data", type=Path, help="directory with HotpotQA, for smollm2")
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--split", default="test")
    given = parser.parse_args()
    for seed in map(int, given.seeds.split(",")):
        if given.what == "smollm2":
            smollm2(given.runs, given.data, seed, given.split)
        else:
            {"teacher": teacher, "hints": hints}[given.what](given.runs, given.world, seed, given.split)


if __name__ == "__main__":
    main()
