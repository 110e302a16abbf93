"""Compare training on two CPU processes (gloo) with one: print the largest difference of logged losses by algorithm.

    python benchmarks/correctness/two_processes.py --out runs/bench/two-processes [--sharded fsdp | zero3]

Each process gets half of a batch. Only whole batches are compared, because accelerate repeats examples at the end of an
epoch to give both processes equal numbers. With --sharded, `leret train --launch` starts the processes with the shipped
configuration, and sharded_on_cpu/ applies it to a CPU; zero3 needs `pip install deepspeed` and a C++ compiler. The
policy is the demo's. For grpo, rloo and ppo in leret's loop it also compares the weights after the first update.
Prints Markdown.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors.numpy import load_file

from leret.core.bundled import ROOT

ONLINE = ("grpo", "rloo", "ppo")
BATCH = 16
ON_CPU = Path(__file__).absolute().parents[1] / "sharded_on_cpu"


def leret(run, *arguments, processes=1, sharded=False):
    command = [sys.executable, "-m", "leret", *arguments, "--run", str(run)]
    path = os.pathsep.join(filter(None, [str(ON_CPU), os.environ.get("PYTHONPATH")]))
    shared = os.environ | ({"PYTHONPATH": path, "DS_ACCELERATOR": "cpu"} if sharded else {})
    group = {"ACCELERATE_USE_CPU": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    started = []
    for rank in range(processes):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        environment = shared | (group | place if processes > 1 else {})
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for process in started:
        _, told = process.communicate()
        if process.returncode or (sharded and told.count("sharded by ") < 2):
            raise SystemExit(f"{' '.join(command)}\n{told[-3000:]}")


def launch_file(name, out):
    text = (ROOT / f"training/accelerate/{name}.yaml").read_text()
    cpu = text.replace("use_cpu: false", f"use_cpu: {str(name == 'fsdp').lower()}")  # DeepSpeed's launcher needs GPUs
    (out / f"{name}.yaml").write_text(
        cpu.replace("num_processes: 4", "num_processes: 2") + "main_process_port: 29612\n"
    )
    return out / f"{name}.yaml"


def losses(run, algorithm, steps, processes, launch=None, suffix=""):
    name = f"{algorithm}-{processes}{f'-{launch.stem}' if launch else ''}{suffix}"
    settings = {
        "name": name, "init_from": "base", "max_steps": steps, "learning_rate": 3e-4, "logging_steps": 1,
        "per_device_train_batch_size": BATCH // processes,
    }  # fmt: skip
    settings |= {"num_iterations": 1, "warmup_ratio": 0} if algorithm in ONLINE else {"max_length": 512}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    if launch is None:
        leret(run, "train", f"training/{algorithm}.yaml", *sets, processes=processes)
    else:
        leret(run, "train", f"training/{algorithm}.yaml", *sets, "--launch", str(launch), sharded=True)
    log = json.loads((run / "policies" / name / "training.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def first_update(run, algorithm):
    """Return the largest difference of a weight after one update at learning rate 3e-4."""
    for processes in (1, 2):
        losses(run, algorithm, 1, processes, suffix="-first")
    one, two = (load_file(run / "policies" / f"{algorithm}-{n}-first" / "model.safetensors") for n in (1, 2))
    return max(abs(one[name] - two[name]).max() for name in one)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--algorithms", nargs="+", default=["sft", "dpo", "ipo", "kto"])
    parser.add_argument("--sharded", choices=["fsdp", "zero3"])
    given = parser.parse_args()
    os.chdir(ROOT)
    run = given.out.absolute() / "run"
    leret(run, "sample", "sampling/demo.yaml", "--set", "data.limit=100")
    print("| training | steps | loss, first and last | largest relative difference of a logged loss | of a weight |")
    print("|---|---|---|---|---|")
    for algorithm in given.algorithms:
        one = losses(run, algorithm, given.steps, 1)
        launch = launch_file(given.sharded, given.out.absolute()) if given.sharded else None
        two = losses(run, algorithm, given.steps, 2, launch)
        apart = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(one, two, strict=True))
        weights = f"{first_update(run, algorithm):.1e}" if algorithm in ONLINE else ""
        print(f"| {algorithm} | {len(one)} | {one[0]:.4f} {one[-1]:.4f} | {apart:.1e} | {weights} |", flush=True)


if __name__ == "__main__":
    main()
