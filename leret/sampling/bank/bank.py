"""The prompt bank: few-shot prompts for a program, bootstrapped from what its own policy gets right.

DSPy's `BootstrapFewShotWithRandomSearch` runs the program on training questions, takes the steps of the runs that
retrieved well as demos, and scores each set of demos on other questions by the reward. The best sets are the bank,
beside the zero-shot prompt: diversity by prompts, where temperature alone would give more of the same.

Source: LeReT, section 4.1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dspy
from dspy.teleprompt import BootstrapFewShotWithRandomSearch
from pydantic_core import to_jsonable_python

from leret.core.aio import suppress_output
from leret.core.types import Outcome, Task
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.retrieval.base import Retriever
from leret.rewards import Reward
from leret.sampling.bank.bootstrap import Student, Watch

_NEVER = 1_000_000_000
"""Errors that DSPy counts before it gives up; the watch gives up at once where it must."""


@dataclass(frozen=True)
class BankPlan:
    """How a bank is made.

    Attributes:
        n_prompts: prompts wanted, the zero-shot one included.
        max_demos: demos a prompt and predictor, at most.
        candidates: sets of demos that are scored.
        threshold: least reward of a run whose steps become demos.
        threads: questions scored at a time, so that the policy can batch them.
    """

    n_prompts: int
    max_demos: int
    candidates: int
    threshold: float
    threads: int = 16


def build_bank(
    program: dspy.Module,
    adapter: dspy.Adapter,
    lm: dspy.BaseLM,
    retriever: Retriever,
    reward: Reward,
    train: Sequence[Task],
    dev: Sequence[Task],
    plan: BankPlan,
    *,
    teacher: dspy.BaseLM,
    on_scored: Callable[[], None] = lambda: None,
    stop: threading.Event | None = None,
) -> list[Prompt]:
    """Bootstrap the prompts of a bank.

    Args:
        program: a module of its own for this.
        adapter: that formats its calls.
        lm: the policy, greedy; scores the candidates.
        retriever: behind the program's searches.
        reward: of the ranking of a whole run; scores demos and candidates.
        train: questions whose runs become demos.
        dev: other questions, which score the candidates.
        plan: how much of it.
        teacher: the policy at the temperature of the runs that become demos.
        on_scored: called for every run that scores a candidate.
        stop: once set, the next run of the program ends the work.

    Returns:
        The zero-shot prompt, then the best few-shot ones, named "1", "2" ... by falling score. Fewer than asked where
        bootstrapping found fewer distinct ones.

    Raises:
        LeretError: the policy or the retriever failed, or the program on every question.
    """
    if plan.n_prompts == 1:
        return [ZERO_SHOT]
    watch = Watch(retriever, stop or threading.Event())

    def metric(example: dspy.Example, prediction: Any, trace: Any = None) -> float:
        if trace is None:
            on_scored()
        elif not prediction.complete:
            return 0.0  # half a run is no demo
        return reward(Outcome(example.task, ranking=prediction.ranking)) or 0.0

    student = Student(program, watch)
    try:
        with suppress_output("dspy"), dspy.context(lm=lm, adapter=adapter, disable_history=True):
            candidates = _search(student, metric, teacher, train, dev, plan)
    except Exception:
        watch.raise_first()
        raise
    watch.raise_first()
    return [ZERO_SHOT, *_distinct(candidates, plan.n_prompts - 1)]


def _search(
    student: Student,
    metric: Callable[..., float],
    teacher: dspy.BaseLM,
    train: Sequence[Task],
    dev: Sequence[Task],
    plan: BankPlan,
) -> list[Mapping[str, Any]]:
    """DSPy's candidates: ``program``, ``score`` in percent, ``seed``."""
    optimizer: Any = BootstrapFewShotWithRandomSearch(
        metric=metric,
        metric_threshold=plan.threshold,
        teacher_settings={"lm": teacher},
        max_bootstrapped_demos=plan.max_demos,
        max_labeled_demos=0,  # a question without its queries is no demo
        num_candidate_programs=max(plan.candidates - 1, 0),  # and one more: the questions in their given order
        num_threads=plan.threads,
        max_errors=_NEVER,
    )
    best = optimizer.compile(
        student, trainset=_examples(train), valset=_examples(dev), restrict=range(-1, plan.candidates - 1)
    )
    return list(best.candidate_programs)


def _examples(questions: Sequence[Task]) -> list[dspy.Example]:
    return [dspy.Example(question=q.text, task=q).with_inputs("question") for q in questions]


def _distinct(candidates: Sequence[Mapping[str, Any]], n: int) -> list[Prompt]:
    """The best candidates that say something, and each something else."""
    found: dict[str, Prompt] = {}
    for candidate in sorted(candidates, key=lambda c: (-c["score"], c["seed"])):
        demos = _demos(candidate["program"].program)
        prompt = Prompt(str(len(found) + 1), demos, score=candidate["score"] / 100)
        if any(demos.values()) and len(found) < n:
            found.setdefault(prompt.digest, prompt)
    return list(found.values())


def _demos(program: dspy.Module) -> dict[str, list[dict[str, Any]]]:
    """Demos by predictor, of the signature's fields alone."""
    return {
        name: [
            {
                field: to_jsonable_python(demo[field], fallback=str)
                for field in predictor.signature.fields
                if field in demo
            }
            for demo in predictor.demos
        ]
        for name, predictor in program.named_predictors()
    }
