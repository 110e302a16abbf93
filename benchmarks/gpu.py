"""Sample and train with a policy of 0.6 billion parameters on a GPU.

    python benchmarks/gpu.py WORK [--hidden N] [--layers N] [--questions N] [--device cuda]

The large policy has the shape of Qwen3-0.6B (by default: 28 layers, width 1,024, 151,936 tokens) and random weights, so
its figures are times and memory, not quality. A made-up reward, the digits in a hash of the completion, gives every
group a spread. Samples `--questions` questions of the demo's world (4 prompts, 2 samples, 16 tokens), then trains by
sft, dpo, grpo and ppo in bfloat16, full weights or LoRA. Prints the seconds of each command, and the highest GPU memory
in use by all processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leret.core.types import Outcome

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
LORA = "lora.r=16", "learning_rate=1e-5"
TRAININGS = (
    ("sft", "sft-full", ("learning_rate=1e-5",)),
    ("dpo", "dpo-lora", LORA),
    ("grpo", "grpo-full", ("learning_rate=1e-6", "questions_per_round=16")),
    ("grpo", "grpo-lora", (*LORA, "questions_per_round=16")),
    ("ppo", "ppo-lora", (*LORA, "questions_per_round=16")),
)


def spread(outcome: Outcome) -> float:
    """Return a number in [0, 1] that depends only on the completion."""
    return int(hashlib.sha256(outcome.text.encode()).hexdigest()[:6], 16) / 16**6


def random_policy(directory: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """Save a policy with random weights and the tokenizer of `english`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "head_dim": 128}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 128)}
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=6, pad_token_id=0,
        **shape, **heads,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.0f}M parameters")
    model.bfloat16().save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "leret" / "demo" / "english" / name, directory)


def gpu_memory() -> float:
    """Return the GPU memory in use, in GiB; 0 without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return 0.0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.check_output(command, text=True).split()[0]) / 1024


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Yield a list of one number: the highest memory seen, each quarter of a second."""
    highest, is_over = [0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.25):
            highest[0] = max(highest[0], gpu_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield highest
    finally:
        is_over.set()
        thread.join()


def leret(run: Path, command: str, *sets: str) -> str:
    """Run a command of leret; return its seconds, with and without its start, and the highest GPU memory."""
    start = time.perf_counter()
    words = [word for key in sets for word in ("--set", key)]
    with peak_memory() as highest:
        call = [sys.executable, "-m", "leret", *command.split(), "--run", str(run), *words]
        done = subprocess.run(call, check=False, cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        return f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    seconds = json.loads((run / "events.jsonl").read_text().splitlines()[-1]).get("seconds", 0.0)
    return f"{time.perf_counter() - start:.1f} s, {seconds:.1f} without the start; {highest[0]:.1f} GiB"


def main() -> None:
    """Print a line per stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    random_policy(work / "large", arguments.hidden, arguments.layers, arguments.vocabulary)
    run = work / "run"
    device = f"device={arguments.device}"
    sets = f"policy.model={work / 'large'}", f"policy.{device}", f"sampling.reward={__file__}:spread"
    figures = leret(run, "sample sampling/demo.yaml", *sets, f"data.limit={arguments.questions}")
    print(f"sample, {arguments.questions * 16} samples: {figures}", flush=True)
    for algorithm, name, keys in TRAININGS:
        more = f"name={name}", "init_from=base", f"max_steps={STEPS}", "logging_steps=1", "dtype=bfloat16", device
        figures = leret(run, f"train training/{algorithm}.yaml", *more, *keys)
        print(f"{name}, {STEPS} steps: {figures}", flush=True)


if __name__ == "__main__":
    main()
