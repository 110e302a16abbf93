"""Do two CPU processes over gloo train as one does? Largest difference of the logged losses, by algorithm.

    python benchmarks/two_processes.py --out runs/bench/two-processes

The two share a batch in halves. The policy is the demo's; each training takes a few steps. Prints Markdown.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from leret.core.bundled import root

BATCH = 16


def leret(run, *arguments, processes=1):
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_port=29611"]
    start = [] if processes == 1 else launch
    command = [sys.executable, *start, "-m", "leret", *arguments, "--run", str(run)]
    on_cpu = os.environ | {"ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, check=False, env=on_cpu, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")


def losses(run, algorithm, steps, processes):
    name = f"{algorithm}-{processes}"
    settings = {
        "name": name, "init_from": "base", "max_steps": steps, "learning_rate": 3e-4, "logging_steps": 1,
        "per_device_train_batch_size": BATCH // processes, "max_length": 512,
    }  # fmt: skip
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    leret(run, "train", f"training/{algorithm}.yaml", *sets, processes=processes)
    log = json.loads((run / "policies" / name / "training.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--algorithms", nargs="+", default=["sft", "dpo", "ipo", "kto"])
    given = parser.parse_args()
    os.chdir(root())
    run = given.out.absolute() / "run"
    leret(run, "sample", "sampling/demo.yaml", "--set", "data.limit=100")
    print("| training | steps | loss, first and last | largest difference of a logged loss, as a fraction |")
    print("|---|---|---|---|")
    for algorithm in given.algorithms:
        one, two = (losses(run, algorithm, given.steps, n) for n in (1, 2))
        apart = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(one, two, strict=True))
        print(f"| {algorithm} | {len(one)} | {one[0]:.4f} {one[-1]:.4f} | {apart:.1e} |", flush=True)


if __name__ == "__main__":
    main()
