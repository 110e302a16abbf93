"""Compare algorithms on the demo's world at equal numbers of samples: recall and AP after the last hop, CPU-seconds.

    python benchmarks/algorithms/online.py sweep RUNS [--world 1] [--algorithms grpo,ppo]   # on dev of another world
    python benchmarks/algorithms/online.py table RUNS [--world 0] [--seeds 0,1,2] [--init sft]  # best rates, on test
    python benchmarks/algorithms/online.py sweep|table RUNS --hotpotqa DATA --model POLICY

``--hotpotqa`` uses HotpotQA's questions (DATA/queries_all.jsonl.gz and DATA/corpus.jsonl.gz) and the small policy that
`python -m models pretrain sampling/hotpotqa.yaml` builds, with about 4,800 completions per algorithm.

RUNS is a directory for the runs. Finished runs are kept, so a command can be stopped and repeated, and ``--algorithms``
can divide the work between several commands. Sampling draws 9,600 completions. Offline algorithms train on these;
online algorithms draw 9,600 more. CPU-seconds are for the whole training process, including its start.

``sweep`` prints the best rates, which RATES holds for ``table``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leret.config.evaluation import EvalRecipe
from leret.config.load import load_recipe
from leret.core.runs import Run
from leret.evaluation.stage import evaluate

SMALL = {"logging_steps": 5, "save_steps": 1000}
PAIRS = {**SMALL, "max_length": 512, "num_train_epochs": 2, "warmup_ratio": 0.05}
ROUNDS = {**SMALL, "max_steps": 150, "questions_per_round": 4, "num_generations": 8, "temperature": 1.0, "top_p": 1.0,
          "max_completion_length": 16, "warmup_ratio": 0.0}  # fmt: skip
BIG_ROUNDS = {**ROUNDS, "max_steps": 288, "questions_per_round": 33, "num_iterations": 2, "num_mini_batches": 8,
              "warmup_ratio": 0.1}  # fmt: skip
ALGORITHMS: dict[str, tuple[str, dict[str, Any], tuple[float, ...]]] = {
    "dpo": ("dpo", PAIRS, (2e-4, 5e-4, 1e-3, 2e-3)),
    "ipo-sequence": ("ipo", {**PAIRS, "reduction": "sequence"}, (2e-4, 5e-4, 1e-3, 2e-3)),
    "ipo-token": ("ipo", {**PAIRS, "reduction": "token"}, (1e-4, 2e-4, 5e-4, 1e-3)),
    "kto": ("kto", {**PAIRS, "num_train_epochs": 1}, (2e-4, 5e-4, 1e-3)),  # trains on all completions, 6 times as many
    "grpo": ("grpo", ROUNDS, (1e-3, 2e-3, 4e-3, 8e-3)),
    "rloo": ("rloo", {**ROUNDS, "beta": 0.0}, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)),
    "ppo": ("ppo", BIG_ROUNDS, (5e-4, 1e-3, 2e-3, 4e-3)),
}
"""Recipe, keys to override, learning rates to try."""

RATES = {"dpo": 1e-3, "ipo-sequence": 2e-3, "ipo-token": 2e-4, "kto": 5e-4, "grpo": 4e-3, "rloo": 4e-3, "ppo": 2e-3}
HOTPOTQA_SWEPT = {
    "dpo": (5e-6, 1e-5, 2e-5, 5e-5),
    "ipo-sequence": (1e-5, 2e-5, 5e-5, 1e-4),
    "ipo-token": (2e-5, 5e-5, 1e-4),
    "kto": (1e-5, 2e-5, 5e-5),
    "grpo": (5e-5, 1e-4),
    "rloo": (5e-5, 1e-4),
    "ppo": (2e-5, 5e-5, 1e-4, 2e-4),
}
HOTPOTQA_RATES = {
    "dpo": 1e-5,
    "ipo-sequence": 2e-5,
    "ipo-token": 5e-5,
    "kto": 5e-5,
    "grpo": 5e-5,
    "rloo": 5e-5,
    "ppo": 1e-4,
}


@dataclass(frozen=True)
class Bench:
    """Setup of a comparison: recipes, sampling keys (by world and seed), learning rates, keys of online rounds."""

    recipes: tuple[str, str, str] = ("sampling/demo.yaml", "training/demo-sft.yaml", "eval/demo.yaml")
    sampling: tuple[str, ...] = ("data.seed={world}", "sampling.seed={seed}")
    swept: dict[str, tuple[float, ...]] = field(default_factory=lambda: {name: a[2] for name, a in ALGORITHMS.items()})
    rates: dict[str, float] = field(default_factory=lambda: RATES)
    rounds: dict[str, dict[str, Any]] = field(default_factory=dict)


def hotpotqa(data: str, model: str) -> Bench:
    """HotpotQA: 300 questions, 1 epoch of pairs, 75 rounds of 64 completions (PPO: 12 of 400), maximum 24 tokens."""
    few = {"max_steps": 75, "max_completion_length": 24}
    rounds = {"grpo": few, "rloo": few, "ppo": {**few, "max_steps": 192, "questions_per_round": 25}}
    rounds |= {name: {"num_train_epochs": 1} for name in ("dpo", "ipo-sequence", "ipo-token")}
    return Bench(
        ("sampling/hotpotqa.yaml", "training/minilm-sft.yaml", "eval/hotpotqa.yaml"),
        (f"data.questions={data}/queries_all.jsonl.gz", f"data.corpus={data}/corpus.jsonl.gz", f"policy.model={model}",
         "data.limit=300", "sampling.seed={seed}"),
        HOTPOTQA_SWEPT, HOTPOTQA_RATES, rounds,
    )  # fmt: skip


def leret(*words: str) -> float:
    """Run a leret command on one thread; return the CPU-seconds of its process and child processes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "leret", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"leret {' '.join(words)} ended with status {status}; run it by hand to see why")
    return usage.ru_utime + usage.ru_stime


def prepared(environment: Bench, runs: Path, world: int, seed: int) -> Run:
    """Return a sampled run with its sft policy, made if missing."""
    path = runs / f"world-{world}-{seed}"
    keys = (key.format(world=world, seed=seed) for key in environment.sampling)
    if not (path / "sample.done").is_file():
        leret("sample", environment.recipes[0], "--run", str(path), *(word for key in keys for word in ("--set", key)))
    if not (path / "policies" / "sft").is_dir():
        leret("train", environment.recipes[1], "--run", str(path), "--set", f"seed={seed}")
    return Run.open(path)


def trained(environment: Bench, run: Run, algorithm: str, rate: float, init: str, seed: int) -> str:
    """Return the name of a policy, trained if missing. Its CPU-seconds are saved with the policy."""
    recipe, keys, _ = ALGORITHMS[algorithm]
    name = f"{algorithm}-{init}-{rate:g}"
    if not (run.policies / name).is_dir():
        given = {
            **keys,
            **environment.rounds.get(algorithm, {}),
            "name": name,
            "init_from": init,
            "learning_rate": rate,
            "seed": seed,
        }
        words = [word for key, value in given.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        seconds = leret("train", f"training/{recipe}.yaml", "--run", str(run.path), *words)
        (run.policies / name / "cpu_seconds").write_text(str(seconds))
    return name


def measured(
    environment: Bench, run: Run, names: list[str], split: str, baseline: str, *keys: str
) -> dict[str, dict[str, Any]]:
    """Return recall, its interval, and AP after the last hop. ``ahead`` is the paired difference to the baseline."""
    given = [f"split={split}", f"systems={json.dumps(names)}", f"baseline={baseline}", *keys]
    summary = evaluate(load_recipe(environment.recipes[2], EvalRecipe, given), run).summary
    last = {row["system"]: row["hops"][-1] for row in summary["rows"]}
    found = {n: {"recall": last[n]["recall"], "ap": last[n]["ap"], "ci": last[n]["recall_ci"]} for n in names}
    for row in summary["comparisons"]:
        if (row["b"], row["measure"]) == (baseline, "recall"):
            low, high = row["ci"]
            found[row["a"]]["ahead"] = f"{row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
    return found


def facts(run: Run, name: str) -> str:
    """Return a policy's CPU-seconds and number of training examples or completions."""
    record = json.loads((run.policies / name / "training.json").read_text())
    seconds = float((run.policies / name / "cpu_seconds").read_text())
    return f"{seconds:6.0f} CPU s {record['examples']:7,} examples"


def sweep(environment: Bench, runs: Path, world: int, algorithms: list[str], init: str) -> None:
    """Evaluate each algorithm at each rate on the dev split."""
    run = prepared(environment, runs, world, 0)
    for algorithm in algorithms:
        names = {rate: trained(environment, run, algorithm, rate, init, 0) for rate in environment.swept[algorithm]}
        found = measured(environment, run, [init, *names.values()], "dev", init)
        for rate, name in names.items():
            row = found[name]
            print(f"{algorithm:13s} {rate:7g}  recall {row['recall']:.3f}  AP {row['ap']:.3f}", facts(run, name))
        best = max(names, key=lambda rate: found[names[rate]]["recall"])
        print(f"{algorithm:13s} best: {best:g}  ({init}: {found[init]['recall']:.3f})", flush=True)


def table(environment: Bench, runs: Path, world: int, seeds: list[int], algorithms: list[str], init: str) -> None:
    """Evaluate the best rates on the test split, per seed. The baseline is the first IPO policy, or else sft."""
    for seed in seeds:
        run = prepared(environment, runs, world, seed)
        names = [
            trained(environment, run, algorithm, environment.rates[algorithm], init, seed) for algorithm in algorithms
        ]
        baseline = next((name for name in names if name.startswith("ipo")), "sft")
        for name, row in measured(environment, run, ["base", "sft", *names], "test", baseline).items():
            more = facts(run, name) if name in names else ""
            print(f"seed {seed}  {name:22s} recall {row['recall']:.3f} {row['ci']}  AP {row['ap']:.3f} ", more)
            if name != baseline:
                print(f"        minus {baseline}: {row.get('ahead')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sweep", "table"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--world", type=int)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--init", default="sft", choices=["sft", "base"])
    parser.add_argument("--hotpotqa", metavar="DATA")
    parser.add_argument("--model", help="directory of the policy, for --hotpotqa")
    given = parser.parse_args()
    environment = hotpotqa(given.hotpotqa, given.model) if given.hotpotqa else Bench()
    algorithms = given.algorithms.split(",")
    if given.what == "sweep":
        sweep(environment, given.runs, 1 if given.world is None else given.world, algorithms, given.init)
    else:
        seeds = [int(seed) for seed in given.seeds.split(",")]
        table(environment, given.runs, given.world or 0, seeds, algorithms, given.init)


if __name__ == "__main__":
    main()
