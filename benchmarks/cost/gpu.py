"""Sample, train and evaluate SmolLM2-135M-Instruct on a GPU: the rewriting row of the table, with speed and memory.

    python benchmarks/cost/gpu.py WORK --data DIR [--gguf FILE] [--questions N] [--steps N] [--shards N] [--set K=V]

Builds the LM from its GGUF file (``--gguf``; without it, `policies/smollm2` must exist), samples `--questions`
questions of `sampling/smollm2-rewrite.yaml` with 8 completions per state, trains by sft, ipo and kto from sft, and
grpo, all in bfloat16 over float32 weights, evaluates them on the test questions in float32, and counts the greedy
completions that change with the batch, in float32 and in bfloat16 (`benchmarks/correctness/batches.py`). ``--data`` is
the folder of queries_all.jsonl.gz and corpus.jsonl.gz. Prints the seconds of each command, its rate, and the peak
memory of its tensors. On a CPU, ``--questions 4 --steps 2 --shards 1 --dtype float32 --limit 3 --greedy 8`` tries the
script."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "sampling/smollm2-rewrite.yaml"
FROM_SFT = ("init_from=sft", "max_steps={steps}")
TRAININGS = {
    "sft": ("init_from=base", "max_steps={steps}"),
    "ipo": FROM_SFT,
    "kto": FROM_SFT,
    "grpo": (
        "init_from=base", "max_steps={rounds}", "questions_per_round=16", "learning_rate=4e-5", "scale_rewards=none",
        "per_device_train_batch_size=128",
    ),
}  # fmt: skip


def build(gguf: Path) -> None:
    """Write `policies/smollm2` from its GGUF file."""
    sys.path.insert(0, str(ROOT))
    from models.smollm2 import convert

    start = time.perf_counter()
    if not (ROOT / "policies/smollm2/config.json").is_file():
        convert(gguf, ROOT / "policies/smollm2")
    print(f"built smollm2: {time.perf_counter() - start:.1f} s", flush=True)


def run(*words: str) -> float:
    """Run a Python command in the repository; return its wall seconds, or end with its output if it fails."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words], check=False, cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return time.perf_counter() - start


def leret(command: str, place: Path, sets: Sequence[str]) -> float:
    """Run a command of leret on a run; return its wall seconds."""
    return run("-m", "leret", *command.split(), "--run", str(place), *(word for key in sets for word in ("--set", key)))


def sample(place: Path, keys: Sequence[str], shards: int) -> str:
    """Sample in ``shards`` processes that share the GPU; return the rate, starts included, and what was drawn."""
    start = time.perf_counter()
    commands = [f"sample {RECIPE} --shard {shard}/{shards}" for shard in range(shards)] if shards > 1 else []
    with ThreadPoolExecutor(shards) as pool:
        list(pool.map(lambda command: leret(command, place, keys), commands))
    leret(f"sample {RECIPE}", place, keys)  # merges the shards
    seconds = time.perf_counter() - start
    events = [json.loads(line) for line in (place / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    end = next(event for event in reversed(events) if event["stage"] == "sample" and "pairs" in event)
    return (
        f"sample: {seconds:.0f} s, {shards} processes, {end['samples']} samples, "
        f"{end['samples'] / seconds:.0f} samples/s, mean reward {end['mean_reward']:.3f}, "
        f"{end['cut']} cut, {end['pairs']} pairs"
    )


def trained(place: Path, name: str, seconds: float) -> str:
    """Return the rate, memory and losses of a training."""
    training = json.loads((place / f"policies/{name}/training.json").read_text(encoding="utf-8"))
    first, last = training["log_history"][0], training["log_history"][-1]
    figures = {
        "steps": training["steps"],
        "examples": training["examples"],
        "tokens/s": last["num_tokens"] / training["seconds"] if "num_tokens" in last else None,
        "completions/s": last["completions/per_second"],
        "peak GiB": last["memory/peak_gib"],
        "reward or loss": [first.get("reward", first.get("loss")), last.get("reward", last.get("loss"))],
        "difference of log-probabilities": last.get("sampling/sampling_logp_difference/max"),
    }
    return f"{name}: {seconds:.0f} s with the start, {training['seconds']:.0f} s without it; {json.dumps(figures)}"


def evaluated(place: Path) -> str:
    """Return recall, AP and all gold found of each system after the last search."""
    rows = json.loads((place / "eval/summary.json").read_text(encoding="utf-8"))["rows"]
    lines = []
    for row in rows:
        last = row["hops"][-1]
        lines.append(
            f"  {row['system']}: " + ", ".join(f"{key} {last[key]:.3f}" for key in ("recall", "ap", "all_found"))
        )
    return "\n".join(lines)


def main() -> None:
    """Print a line per stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=1700)
    parser.add_argument(
        "--steps", type=int, default=100, help="steps of sft, ipo and kto; rounds of grpo: half as many"
    )
    parser.add_argument("--shards", type=int, default=4, help="processes that sample")
    parser.add_argument("--dtype", default="bfloat16", help="of training: autocast over float32 weights")
    parser.add_argument("--limit", type=int, help="test questions; default: all")
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--greedy", type=int, default=500, help="greedy completions to compare")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for sampling")
    arguments = parser.parse_args()
    if arguments.gguf:
        build(arguments.gguf.resolve())
    place, data = arguments.work.resolve() / "run", arguments.data.resolve()
    files = [f"data.questions={data / 'queries_all.jsonl.gz'}", f"data.corpus={data / 'corpus.jsonl.gz'}"]
    keys = [*files, f"policy.model={arguments.model}", f"data.limit={arguments.questions}", "sampling.samples=8"]
    print(sample(place, [*keys, *arguments.set], arguments.shards), flush=True)
    sizes = {"steps": arguments.steps, "rounds": max(1, arguments.steps // 2)}
    for name in arguments.trainings:
        own = [key.format(**sizes) for key in TRAININGS[name]]
        seconds = leret(f"train training/{name}.yaml", place, [*own, f"dtype={arguments.dtype}", "logging_steps=1"])
        print(trained(place, name, seconds), flush=True)
    systems = ["systems=[raw-question, base, policies]", "baseline=raw-question"]
    limit = [f"limit={arguments.limit}"] if arguments.limit else []
    seconds = leret("eval eval/hotpotqa.yaml", place, ["split=test", *systems, *limit])
    print(f"eval: {seconds:.0f} s\n{evaluated(place)}", flush=True)
    start = time.perf_counter()
    words = [
        sys.executable,
        "benchmarks/correctness/batches.py",
        RECIPE,
        *(word for key in files for word in ("--set", key)),
    ]
    words += ["--set", f"policy.model={arguments.model}", "--temperature", "0", "--demos", "0", "--sizes", "8", "64"]
    words += [
        "--completions",
        str(arguments.greedy),
        "--prompts",
        str(arguments.greedy),
        "--max-tokens",
        "32",
        "--dtypes",
        "float32",
        "bfloat16",
    ]
    done = subprocess.run(words, check=False, cwd=ROOT, text=True, capture_output=True)
    print(f"batches: {time.perf_counter() - start:.0f} s\n{done.stdout}{done.stderr[-1500:]}", flush=True)


if __name__ == "__main__":
    main()
