"""LeReT's sampling in plain DSPy, as a baseline for benchmarks."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from leret.programs.prompts import Prompt
from leret.programs.search import Found
from leret.rewards.ranking import ap
from leret.rollouts.environment import Environment

THREADS = 32


@dataclass(frozen=True)
class Timed:
    """One measurement: scored samples, wall-clock seconds, and CPU-seconds of this process."""

    samples: int
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.wall_s


class Loop(dspy.Module):
    """Tries each prompt in turn, searches once per query, and draws the next state by reward."""

    def __init__(self, program: Any, prompts: Sequence[Prompt], n: int) -> None:
        super().__init__()
        self.hops, self.n, self.search = program.hops, n, program.search
        self.writers = []
        for prompt in prompts:
            writer = program.write_query.deepcopy()
            writer.demos = [dspy.Example(**demo) for demo in prompt.demos.get("write_query", ())]
            self.writers.append(writer)

    def forward(self, question: str, gold: Sequence[str]) -> dspy.Prediction:
        found, n_scored = Found(), 0
        for _ in range(self.hops):
            tried: list[tuple[float, Found]] = []
            for writer in self.writers:
                for query in self._queries(writer, question, found):
                    after = self.search(query, found)
                    tried.append((ap(after.doc_ids, gold), after))
                n_scored += self.n
            going_on = [(value, after) for value, after in tried if value < 1]
            if not going_on:
                break
            found = random.choices([f for _, f in going_on], [value + 0.01 for value, _ in going_on])[0]
        return dspy.Prediction(samples=n_scored)

    def _queries(self, writer: Any, question: str, found: Found) -> list[str]:
        try:
            config = {"n": self.n} if self.n > 1 else {}
            made = writer(question=question, context=found.passages, config=config)
        except AdapterParseError:
            return []
        return list(made.completions.query)


def dspy_loop(environment: Environment, prompts: Sequence[Prompt], questions: int, n: int) -> Timed:
    """Run a recipe's sampling with ``dspy.Evaluate``, one thread per question, without storing anything.

    Args:
        environment: environment of a recipe with a served policy.
        prompts: prompts of the bank.
        questions: number of questions.
        n: completions per prompt and state, in one request.
    """
    policy = environment.recipe.policy
    lm = dspy.LM(
        f"openai/{policy.model}",
        api_base=policy.urls[0],
        api_key="none",
        cache=False,
        temperature=policy.temperature,
        max_tokens=policy.max_tokens,
    )
    counted: list[int] = []
    examples = [
        dspy.Example(question=q.text, gold=list(q.gold)).with_inputs("question", "gold")
        for q in environment.tasks(limit=questions)
    ]

    def count(example: Any, prediction: Any, trace: Any = None) -> float:
        counted.append(prediction.samples)
        return 0.0

    loop = Loop(environment.program(), prompts, n)
    evaluate = dspy.Evaluate(devset=examples, metric=count, num_threads=THREADS, display_progress=False)
    with dspy.context(lm=lm, adapter=environment.adapter, rm=environment.retriever):
        began, cpu = time.perf_counter(), time.process_time()
        evaluate(loop)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    if len(counted) != len(examples):
        raise SystemExit(f"{len(examples) - len(counted)} questions failed in dspy.Evaluate")
    return Timed(sum(counted), wall_s, cpu_s)
