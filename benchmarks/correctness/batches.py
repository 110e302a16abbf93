"""Check whether completions of the in-process engine depend on the batch they are sampled in.

    OMP_NUM_THREADS=1 python benchmarks/correctness/batches.py sampling/demo.yaml
    OMP_NUM_THREADS=1 python benchmarks/correctness/batches.py sampling/hotpotqa.yaml \
        --set data.questions=Q --set data.corpus=C
    python benchmarks/correctness/batches.py sampling/smollm2-rewrite.yaml --set data.questions=Q --set data.corpus=C \
        --temperature 0 --completions 500 --demos 0 --sizes 8 40 --dtypes float32 bfloat16

Prompts are as the recipe's program sends them: a question with zero to three passages and zero to three demos. Each
completion has its own seed. The same completions are sampled one by one, in batches of 8 and in batches of 64 different
prompts, and are compared token by token, for each dtype by itself.

    different            completions that differ from those sampled one by one
    largest difference   largest rounding difference between log-probabilities of a token, in equal completions
    seconds              CPU time of this process

The exit code is 0 if no completion differs, else 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.policies.base import Request
from leret.policies.load import make_policy
from leret.policies.local.decoder import Generated, Job
from leret.policies.local.policy import LocalPolicy
from leret.programs.prompts import Prompt
from leret.rollouts.environment import Environment


def jobs_of(recipe: SamplingRecipe, policy: LocalPolicy, arguments: argparse.Namespace) -> list[Job]:
    """Return one job per completion, in an order that mixes prompts."""
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as cache, Environment(recipe, Path(cache)) as environment:
        questions = [question.text for question in environment.tasks("train", arguments.prompts + 3)]
        [(predictor, _)] = environment.program().named_predictors()
        found = environment.retriever.search(questions, 3)
        calls = [
            {"question": text, "context": [str(passage) for passage in ranking]}
            for text, ranking in zip(questions, found, strict=True)
        ]
        demos = [{**call, "query": call["question"]} for call in calls[:3]]
        bank = [Prompt(str(n), {predictor: demos[:n]}) for n in range(arguments.demos + 1)]
        messages = [
            environment.formatter.messages(
                environment.formatter.need(predictor, {**call, "context": call["context"][: rng.choice((0, 0, 1, 3))]}),
                rng.choice(bank),
            )
            for call in calls[3:]
        ]
    n_samples = -(-arguments.completions // len(messages))
    requests = [
        Request(own, (rng.randrange(2**63),), arguments.temperature, arguments.max_tokens, top_p=arguments.top_p)
        for _ in range(n_samples)
        for own in messages
    ][: arguments.completions]
    rng.shuffle(requests)
    return [policy._job(request) for request in requests]


def sampled(policy: LocalPolicy, jobs: list[Job], size: int) -> list[Generated]:
    batches = (jobs[start : start + size] for start in range(0, len(jobs), size))
    return [own for batch in batches for [own] in policy.model.decoder.run(batch)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--model", help="model directory; default: the recipe's policy.model")
    parser.add_argument("--completions", type=int, default=10_000)
    parser.add_argument("--prompts", type=int, default=1000, help="number of different prompts")
    parser.add_argument("--demos", type=int, default=3, choices=range(4), help="maximum demos in a prompt")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--dtypes", nargs="+", default=["auto"], help="float32, bfloat16 ...; auto: the policy's")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 8, 64], help="batch sizes; the first is compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, SamplingRecipe, arguments.set, optional=("policy.model",))
    print("| dtype | batch | completions | tokens | different | largest difference | seconds |")
    print("|---|---|---|---|---|---|---|")
    n_different = sum(compare(recipe, arguments, dtype) for dtype in arguments.dtypes)
    sys.exit(1 if n_different else 0)


def compare(recipe: SamplingRecipe, arguments: argparse.Namespace, dtype: str) -> int:
    """Print a row for each batch size; return how many completions differ from those sampled one by one."""
    settings = recipe.policy.in_process(arguments.model or recipe.policy.model)
    policy = make_policy(settings.model_copy(update={"dtype": dtype}))
    assert isinstance(policy, LocalPolicy)
    jobs = jobs_of(recipe, policy, arguments)
    first: list[Generated] = []
    n_different = 0
    for size in arguments.sizes:
        began = time.process_time()
        completions = sampled(policy, jobs, size)
        seconds = time.process_time() - began
        first = first or completions
        pairs = list(zip(first, completions, strict=True))
        different = [(one, other) for one, other in pairs if one.token_ids != other.token_ids]
        rounding = max(
            (
                abs(p - q)
                for one, other in pairs
                if one.token_ids == other.token_ids
                for p, q in zip(one.logprobs, other.logprobs, strict=True)
            ),
            default=0.0,
        )
        n_tokens = sum(len(own.token_ids) for own in completions)
        row = f"| {dtype} | {size} | {len(jobs)} | {n_tokens} | {len(different)} | {rounding:.1e} | {seconds:.0f} |"
        print(row, flush=True)
        for one, other in different[:5]:
            texts = [policy.model.encoder.to_text(generated.token_ids) for generated in (one, other)]
            print(f"  {texts[0]!r} -> {texts[1]!r}")
        n_different += len(different)
    policy.close()
    return n_different


if __name__ == "__main__":
    main()
