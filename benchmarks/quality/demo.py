"""Run the demo on several seeds, and compare prompt-diverse with temperature-only sampling at equal LM calls.

    python benchmarks/quality/demo.py --seeds 0 1 2 --out runs/bench/demo

Each seed has its own world, sampling and training, and starts from the shipped policy. Finished runs are kept, so that
a stopped benchmark can continue. Prints Markdown.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet

from leret.core.runs import Run
from leret.sampling.store.store import Store

SYSTEMS = ("raw-question", "oracle-titles", "base", "bank:1", "sft", "sft-more", "ipo")


def leret(*arguments):
    subprocess.run([sys.executable, "-m", "leret", *map(str, arguments)], check=True)


def diverse(out, seed):
    leret("demo", "--run", out, "--seed", seed)
    leret("train", "training/demo-sft-more.yaml", "--run", out, "--set", f"seed={seed}")
    leret("eval", "eval/demo.yaml", "--run", out, "--set", f"seed={seed}")


def temperature_only(out, seed):
    """Sample as many completions per state, all from the zero-shot prompt."""
    seeds = ["--set", f"data.seed={seed}", "--set", f"sampling.seed={seed}"]
    one_prompt = ["--set", "sampling.prompts=1", "--set", "sampling.samples=8"]
    leret("sample", "sampling/demo.yaml", "--run", out, *seeds, *one_prompt)
    for name in ("demo-sft", "demo-ipo"):
        leret("train", f"training/{name}.yaml", "--run", out, "--set", f"seed={seed}")
    leret("eval", "eval/demo.yaml", "--run", out, "--set", f"seed={seed}")


def summary(out):
    return json.loads((out / "eval/summary.json").read_text())


def last(row, measure, kind=None):
    hops = row["by_type"][kind]["hops"] if kind else row["hops"]
    return hops[-1][measure]


def spread(values):
    return f"{statistics.mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def table(runs):
    print(
        "| system | recall, hop 1 | recall, hop 2 | AP, hop 2 | all gold found | recall, bridge | recall, comparison |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in SYSTEMS:
        rows = [row for run in runs for row in run["rows"] if row["system"] == name]
        if not rows:
            continue
        cells = [
            spread([row["hops"][0]["recall"] for row in rows]),
            *(spread([last(row, measure) for row in rows]) for measure in ("recall", "ap", "all_found")),
            *(spread([last(row, "recall", kind) for row in rows]) for kind in ("bridge", "comparison")),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def differences(runs, pairs):
    print("\n| a | b | measure | difference by seed (95 % interval) |\n|---|---|---|---|")
    for a, b in pairs:
        for measure in ("recall", "ap", "all_found"):
            found = [difference(run, a, b, measure) for run in runs]
            print(f"| {a} | {b} | {measure} | {'; '.join(found)} |")


def difference(run, a, b, measure):
    for c in run["comparisons"]:
        if c["measure"] == measure and {c["a"], c["b"]} == {a, b}:
            sign = 1 if c["a"] == a else -1
            low, high = sorted(sign * x for x in c["ci"])
            return f"{sign * c['difference']:+.3f} [{low:+.3f}, {high:+.3f}] p={c['p']:.4f}"
    return "not compared"


def sampling_facts(out):
    """Return statistics of the sampled training data: distinct queries, best rewards, usable pairs."""
    run = Run.open(out)
    with Store(run.store, read_only=True) as store:
        states = [list(group.samples) for group in store.groups()]
    rewards = [[s.reward for s in samples if s.reward is not None] for samples in states]
    return {
        "completions per state": statistics.mean(len(samples) for samples in states),
        "distinct queries per state": statistics.mean(len({s.completion for s in samples}) for samples in states),
        "best reward per state": statistics.mean(max(r, default=0.0) for r in rewards),
        "mean reward": statistics.mean(r for state in rewards for r in state),
        "share of states with different rewards": statistics.mean(len(set(r)) > 1 for r in rewards),
        "pairs": pyarrow.parquet.read_table(run.preferences / "train.parquet").num_rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/demo"))
    parser.add_argument("--arms", nargs="+", choices=["prompts", "temperature"], default=["prompts", "temperature"])
    arguments = parser.parse_args()
    arms = {name: {"prompts": diverse, "temperature": temperature_only}[name] for name in arguments.arms}
    runs = {name: [] for name in arms}
    facts = {name: [] for name in arms}
    for seed in arguments.seeds:
        for name, work in arms.items():
            out = arguments.out / f"{name}-{seed}"
            work(out, seed)
            runs[name].append(summary(out))
            facts[name].append(sampling_facts(out))
    if "prompts" in arms:
        print(f"\n## Demo, seeds {arguments.seeds}, mean (min-max)\n")
        table(runs["prompts"])
        differences(runs["prompts"], [("ipo", rival) for rival in ("base", "raw-question", "sft", "sft-more")])
    if len(arms) == 1:
        return
    print("\n## Four prompts x 2 samples against one prompt x 8 samples\n")
    print("| | four prompts | temperature only |\n|---|---|---|")
    for key in facts["prompts"][0]:
        cells = [spread([f[key] for f in facts[name]]) for name in arms]
        print(f"| {key} | {' | '.join(cells)} |")
    for system in ("base", "sft", "ipo"):
        for measure in ("recall", "all_found"):
            values = [
                [last(row, measure) for run in runs[name] for row in run["rows"] if row["system"] == system]
                for name in arms
            ]
            print(f"| {system}: {measure}, hop 2 | {' | '.join(map(spread, values))} |")


if __name__ == "__main__":
    main()
