"""Compare two rounds with one round at equal numbers of sampled completions, on the demo's world.

    python benchmarks/algorithms/rounds.py --seeds 0 1 2 --out runs/bench/rounds

One round samples all questions from the shipped policy, and trains sft and ipo. With two rounds, each samples half of
these questions, and the second round samples from the policy that the first round trained. Finished runs are kept,
so that a stopped benchmark can continue. Prints Markdown.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from leret.core.runs import Run
from leret.sampling.store.store import Store

RECIPES = ("sampling/demo.yaml", "training/demo-sft.yaml", "training/demo-ipo.yaml", "eval/demo.yaml")
SYSTEMS = {"one round": ("sft", "ipo"), "two rounds": ("sft", "ipo", "sft-2", "ipo-2")}


def loop(out, seed, rounds, questions):
    values = {"data.seed": seed, "sampling.seed": seed, "seed": seed, "data.limit": questions}
    values |= {"systems": "[base, policies]"}
    given = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "leret", "run", *RECIPES, "--run", str(out), "--rounds", str(rounds), *given]
    subprocess.run(command, check=True, stdout=sys.stderr)


def spread(values):
    return f"{statistics.mean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})"


def result(out):
    """Return each system's measures after the last hop, and the number of sampled completions."""
    rows = json.loads((out / "eval/summary.json").read_text())["rows"]
    with Store(Run(out).store, read_only=True) as store:
        return {row["system"]: row["hops"][-1] for row in rows}, store.counts()["samples"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/rounds"))
    args = parser.parse_args()
    print("| | system | completions sampled | recall, hop 2 | AP, hop 2 |\n|---|---|---|---|---|")
    for rounds, (arm, systems) in enumerate(SYSTEMS.items(), 1):
        results = []
        for seed in args.seeds:
            out = args.out / f"{rounds}-{seed}"
            loop(out, seed, rounds, args.questions)
            results.append(result(out))
        for system in ("base", *systems):
            found = [hops[system] for hops, _ in results]
            counts = ", ".join(f"{n:,}" for _, n in results) if system == systems[-1] else ""
            cells = [counts, *(spread([hops[measure] for hops in found]) for measure in ("recall", "ap"))]
            print(f"| {arm} | {system} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
