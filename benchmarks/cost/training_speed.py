"""Compare the speed of training with leret and with a bare TRL script with the same settings.

    python benchmarks/cost/training_speed.py --out runs/bench/training-speed --turns 3 --steps 40

Both take turns. Each starts with the same targets or pairs in memory, then loads, encodes, computes the reference,
trains and saves a policy. leret's time includes its checks. The bare script has TRL read conversations and pad batches;
`leret-unpacked` is leret with padded batches. The policy is the demo's, on one CPU thread. Prints Markdown.

    python benchmarks/cost/training_speed.py --out OUT --turns 2 --steps 2 --questions 8 --batch 8 --rate 2e-5 \
        --recipe sampling/smollm2-rewrite.yaml --set data.questions=Q --set data.corpus=C --set sampling.samples=8

measures SmolLM2-135M-Instruct (`make smollm2`). For GRPO, add `--rows 8` to save memory.

GRPO compares leret's loop with `engine: trl`, both on the stored states with 8 completions per state and about 64 per
step. It prints the time per completion, and the reward's share (running the program from the state, search, scoring).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ALGORITHMS = ("sft", "dpo", "grpo")


def settings(given):
    return {
        "learning_rate": given.rate,
        "per_device_train_batch_size": given.batch,
        "logging_steps": 1,
        "seed": 0,
    }


def recipe_of(given):
    from leret.config.load import load_recipe
    from leret.config.sampling import SamplingRecipe

    return load_recipe(given.recipe, SamplingRecipe, [f"data.limit={given.questions}", *given.set])


def sampled(path, given):
    from leret.core.runs import Run
    from leret.sampling.stage import sample

    run = Run.create(path)
    sample(recipe_of(given), run)
    return run


def by_leret(run, algorithm, out, given, packing):
    from trl import DPOTrainer, SFTTrainer  # noqa: F401  import before timing, as for TRL

    from leret.policies.local import packing as module
    from leret.training.algorithms import ALGORITHMS as TABLE
    from leret.training.stage import train

    if not packing:
        module.share_prompts = lambda model: False
    name = f"{algorithm}-{out.name}"
    fixed = {"name": name, "init_from": "base", "max_steps": given.steps, "max_length": 512, "save_steps": 10**6}
    recipe = TABLE[algorithm].settings(**fixed, **settings(given))
    began, cpu = time.perf_counter(), time.process_time()
    report = train(recipe, run)
    return time.perf_counter() - began, time.process_time() - cpu, report.loss_last


def by_trl(run, algorithm, out, given):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from leret.policies.checkpoints import find_model
    from leret.training.algorithms import ALGORITHMS as TABLE
    from leret.training.data import RunSamples

    torch.set_num_threads(1)
    examples = TABLE[algorithm].examples(TABLE[algorithm].settings(), RunSamples(run))
    began, cpu = time.perf_counter(), time.process_time()
    names = ("completion",) if algorithm == "sft" else ("chosen", "rejected")
    rows = [
        {"prompt": list(one.prompt)}
        | {name: [{"role": "assistant", "content": text}] for name, text in zip(names, one.completions, strict=True)}
        for one in examples
    ]
    same = settings(given) | {
        "output_dir": str(out), "max_steps": given.steps, "max_length": 512, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "dataloader_pin_memory": False, "lr_scheduler_type": "linear", "optim": "adamw_torch_fused",
    }  # fmt: skip
    model, tokenizer = (
        kind.from_pretrained(find_model(recipe_of(given).policy.model))
        for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    if algorithm == "sft":
        arguments = SFTConfig(**same, completion_only_loss=True)
        trainer = SFTTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    else:
        arguments = DPOConfig(**same, beta=0.05, precompute_ref_log_probs=True)
        trainer = DPOTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(out))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return time.perf_counter() - began, time.process_time() - cpu, losses[-1]


def by_grpo(run, side, out, given):
    from trl import GRPOTrainer  # noqa: F401

    from leret.extras.trl import GRPOWithTRL, StoredStates
    from leret.policies.local.policy import LocalPolicy
    from leret.rollouts.rounds import RoundSampler
    from leret.training.rounds.grpo import GRPORecipe
    from leret.training.stage import train

    spent = {"sampled": 0.0, "completed": 0.0, "scored": 0.0}

    def timed(kind, method, name):
        inner = getattr(kind, method)

        def call(*arguments, **more):
            began = time.process_time()
            try:
                return inner(*arguments, **more)
            finally:
                spent[name] += time.process_time() - began

        setattr(kind, method, call)

    timed(RoundSampler, "sample", "sampled")
    timed(LocalPolicy, "complete_many", "completed")
    timed(StoredStates, "__call__", "scored")
    keys = {**settings(given), "per_device_train_batch_size": given.rows}
    kind = GRPORecipe
    if side == "trl":
        kind = GRPOWithTRL
        keys["gradient_accumulation_steps"] = 64 // given.rows
    recipe = kind(
        name=f"grpo-{out.name}", init_from="base", states="stored", max_steps=given.steps,
        questions_per_round=4, save_steps=10**6, max_completion_length=16, **keys,
    )  # fmt: skip
    began, cpu = time.perf_counter(), time.process_time()
    report = train(recipe, run)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    n = report.examples if side == "leret" else 64 * given.steps
    reward = spent["scored"] if side == "trl" else spent["sampled"] - spent["completed"]
    return wall, cpu, report.loss_last, n, reward


def one(side, algorithm, turn, given):
    from leret.core.runs import Run

    run, place = Run(given.out / "run"), given.out / f"{side}-{turn}"
    if algorithm == "grpo":
        found = by_grpo(run, side, place, given)
    elif side == "trl":
        found = by_trl(run, algorithm, place, given)
    else:
        found = by_leret(run, algorithm, place, given, side == "leret")
    print(json.dumps(found))


def measured(*arguments):
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--questions", type=int, default=150)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--recipe", default="sampling/demo.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for sampling")
    parser.add_argument("--batch", type=int, default=16, help="examples or pairs per step; GRPO has 64 completions")
    parser.add_argument(
        "--rows", type=int, default=64, choices=(8, 16, 32, 64), help="completions in memory at once, for GRPO"
    )
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "ALGORITHM", "TURN"))
    given = parser.parse_args()
    if given.one:
        return one(*given.one, given)
    sampled(given.out / "run", given)
    sides = {name: ("trl", "leret", *(() if name == "grpo" else ("leret-unpacked",))) for name in given.algorithms}
    figures = {(side, algorithm): [] for algorithm in given.algorithms for side in sides[algorithm]}
    for turn in range(given.turns):
        for algorithm in given.algorithms:
            for side in sides[algorithm] if turn % 2 else reversed(sides[algorithm]):
                figures[side, algorithm].append(measured(*sys.argv[1:], "--one", side, algorithm, turn))
                print(algorithm, side, turn, figures[side, algorithm][-1], file=sys.stderr, flush=True)
    print("| training | by | CPU-seconds, median (range) | seconds | last loss | throughput against TRL |")
    print("|---|---|---|---|---|---|")
    for (side, algorithm), turns in figures.items():
        wall, cpu, losses, *_ = zip(*turns, strict=True)
        base = statistics.median(figure[1] for figure in figures["trl", algorithm])
        span = f"{statistics.median(cpu):.1f} ({min(cpu):.1f}-{max(cpu):.1f})"
        ratio = base / statistics.median(cpu)
        print(f"| {algorithm} | {side} | {span} | {statistics.median(wall):.1f} | {losses[0]:.4f} | {ratio:.2f} |")
    for side, turns in ((side, turns) for (side, algorithm), turns in figures.items() if algorithm == "grpo"):
        each = statistics.median(1000 * cpu / n for _, cpu, _, n, _ in turns)
        share = statistics.median(reward / cpu for _, cpu, _, _, reward in turns)
        print(f"GRPO by {side}: {turns[0][3]} completions, {each:.1f} CPU-ms each; the reward takes {share:.1%}")
    return None


if __name__ == "__main__":
    main()
