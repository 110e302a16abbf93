"""Do two CPU processes over gloo train as one does? Largest difference of the logged losses, by algorithm.

    python benchmarks/two_processes.py --out runs/bench/two-processes [--fsdp]

The two share a batch in halves, and whole batches alone are looked at: at the end of an epoch accelerate repeats
examples, so that both have as many. With --fsdp they are launched by `leret train --launch`, by the shipped
training/accelerate/fsdp.yaml on the CPU. The policy is the demo's. Prints Markdown.
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
    command = [sys.executable, "-m", "leret", *arguments, "--run", str(run)]
    group = {"ACCELERATE_USE_CPU": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    started = []
    for rank in range(processes):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        environment = os.environ | (group | place if processes > 1 else {})
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for process in started:
        _, told = process.communicate()
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}\n{told[-3000:]}")


def fsdp_file(out):
    text = (root() / "training/accelerate/fsdp.yaml").read_text()
    text = text.replace("use_cpu: false", "use_cpu: true").replace("num_processes: 4", "num_processes: 2")
    (out / "fsdp.yaml").write_text(f"{text}main_process_port: 29612\n")
    return out / "fsdp.yaml"


def losses(run, algorithm, steps, processes, fsdp=None):
    name = f"{algorithm}-{processes}{'-fsdp' if fsdp else ''}"
    settings = {
        "name": name, "init_from": "base", "max_steps": steps, "learning_rate": 3e-4, "logging_steps": 1,
        "per_device_train_batch_size": BATCH // processes, "max_length": 512,
    }  # fmt: skip
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    sets += ["--launch", str(fsdp)] if fsdp else []
    leret(run, "train", f"training/{algorithm}.yaml", *sets, processes=1 if fsdp else processes)
    log = json.loads((run / "policies" / name / "training.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--algorithms", nargs="+", default=["sft", "dpo", "ipo", "kto"])
    parser.add_argument("--fsdp", action="store_true")
    given = parser.parse_args()
    os.chdir(root())
    run = given.out.absolute() / "run"
    leret(run, "sample", "sampling/demo.yaml", "--set", "data.limit=100")
    print("| training | steps | loss, first and last | largest difference of a logged loss, as a fraction |")
    print("|---|---|---|---|")
    for algorithm in given.algorithms:
        one = losses(run, algorithm, given.steps, 1)
        two = losses(run, algorithm, given.steps, 2, fsdp_file(given.out.absolute()) if given.fsdp else None)
        apart = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(one, two, strict=True))
        print(f"| {algorithm} | {len(one)} | {one[0]:.4f} {one[-1]:.4f} | {apart:.1e} |", flush=True)


if __name__ == "__main__":
    main()
