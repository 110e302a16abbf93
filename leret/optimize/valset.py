"""A program's score on held-out examples, by `dspy.Evaluate`, which takes every failure for a bad score."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import dspy
from dspy.teleprompt.bootstrap_finetune import copy_program_with_lms

from leret.core.errors import ProgramError, reason
from leret.core.progress import Progress
from leret.optimize.inputs import CallBudget, greedy_lm
from leret.sampling.bank.bootstrap import NEVER, THREADS, RunMonitor


def score(
    stage: str,
    program: dspy.Module,
    valset: Sequence[dspy.Example],
    metric: Callable[..., Any],
    budget: CallBudget,
    progress: Progress,
) -> float:
    """The mean metric in percent, of greedy runs; an outage and a fault of the metric are raised."""
    scored = ScoredProgram(copy_program_with_lms(program))
    for predictor in scored.program.predictors():
        predictor.lm = greedy_lm(predictor.lm, budget)
    progress.start(f"valset, {stage}", len(valset))
    watched = scored.watched(metric, progress)
    evaluate = dspy.Evaluate(devset=list(valset), metric=watched, num_threads=THREADS, max_errors=NEVER)
    found = float(evaluate(scored, callback_metadata={"optimizer": "LeReT", "stage": stage}).score)
    progress.finish()
    scored.monitor.raise_first(f"valset, stage {stage}")
    return found


class ScoredProgram(dspy.Module):
    """A program as `dspy.Evaluate` runs it: no prediction where a completion does not parse."""

    def __init__(self, program: dspy.Module) -> None:
        super().__init__()
        self.program, self.monitor = program, RunMonitor()

    def forward(self, **inputs: Any) -> Any:
        return self.monitor.run(self.program, inputs)[0]

    def watched(self, metric: Callable[..., Any], progress: Progress) -> Callable[..., float]:
        """The metric; 0 where there is no prediction."""

        @functools.wraps(metric)
        def score(example: dspy.Example, prediction: Any, trace: Any = None) -> float:
            progress.advance(1)
            try:
                return 0.0 if prediction is None else float(metric(example, prediction))
            except Exception as error:
                failed = ProgramError(f"the metric failed: {reason(error)}")
                self.monitor.outage = failed.with_traceback(error.__traceback__)
                raise

        return score
