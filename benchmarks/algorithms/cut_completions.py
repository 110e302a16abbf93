"""Train on a run whose completions are mostly cut by max_tokens, and compare the lengths of greedy answers.

    python benchmarks/algorithms/cut_completions.py DIR

Samples the demo zero-shot with policy.max_tokens=3, so that most completions are cut, and trains SFT on all of them.
(Few-shot prompts would teach answers of their own lengths.) Then it answers 60 of the sampled states greedily, with the
base and with the trained policy, and prints both mean lengths and their paired difference. Training that adds an end
token to cut completions makes every answer end early.
"""

from __future__ import annotations

import argparse
import asyncio
from itertools import islice
from pathlib import Path

from leret.config.load import load_recipe
from leret.config.policy import LocalPolicySettings
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.core.types import Messages
from leret.policies.base import Request
from leret.policies.local.policy import LocalPolicy
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from leret.training.stage import train
from leret.training.stored.sft import SFTRecipe

CUT_AT, LONGEST, N_STATES = 3, 16, 60
OVERRIDES = ["data.limit=40", f"policy.max_tokens={CUT_AT}", "sampling.prompts=1", "sampling.samples=16"]
SFT = SFTRecipe(
    name="sft-cut",
    targets="random",
    require_spread=False,
    max_targets=8,
    num_train_epochs=8,
    learning_rate=2e-3,
    per_device_train_batch_size=16,
    max_length=512,
)


def lengths(model: str, prompts: list[Messages]) -> list[int]:
    """Return the number of tokens of a model's greedy answer to each prompt, end token included."""

    async def answer() -> list[int]:
        policy = LocalPolicy(LocalPolicySettings(model=model))
        requests = [Request(messages, (0,), 0.0, LONGEST) for messages in prompts]
        answers = await asyncio.gather(*map(policy.complete, requests))
        await policy.aclose()
        return [completion.n_completion_tokens for [completion] in answers]

    return asyncio.run(answer())


def compare(directory: Path, sft: SFTRecipe = SFT) -> dict[str, float]:
    """Sample, train and answer; return the share of cut samples, the mean lengths and early ends of both policies."""
    run = Run.create(directory)
    report = sample(load_recipe("sampling/demo.yaml", SamplingRecipe, OVERRIDES), run)
    trained = train(sft, run)
    with Store(run.store, read_only=True) as store:
        prompts = [group.state.messages for group in islice(store.groups(), N_STATES)]
    before, after = lengths("demo", prompts), lengths(str(trained.path), prompts)
    return {
        "share of cut samples": report.cut / report.samples,
        "states": len(prompts),
        "mean length, base": sum(before) / len(before),
        "mean length, sft": sum(after) / len(after),
        "mean paired difference": sum(b - a for a, b in zip(before, after, strict=True)) / len(before),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory of the run")
    for name, value in compare(parser.parse_args().directory).items():
        print(f"{name:32} {value:.3f}")


if __name__ == "__main__":
    main()
