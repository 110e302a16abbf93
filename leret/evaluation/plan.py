"""What an evaluation would do and cost, without doing it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from leret.config.evaluation import EvalRecipe
from leret.core.progress import Silent
from leret.core.runs import Run
from leret.evaluation.evaluator import Evaluator
from leret.evaluation.held_out import held_out
from leret.evaluation.job import Job, finished, on_data, resolve
from leret.evaluation.stage import open_evaluator
from leret.sampling.plan import steps_of
from leret.sampling.rollouts.environment import Environment, refuse_changed_files


@dataclass(frozen=True)
class EvalPlan:
    """What is asked for, what is there, and what the rest costs.

    Attributes:
        questions: held out, with gold documents.
        systems: in the order of the table.
        to_ask: those of them that anything would be asked of.
        steps: LM calls of one run of the program; None where they cannot be told without an LM.
        lm_calls: at most; None likewise.
        done: nothing would be done.
    """

    questions: int
    systems: tuple[str, ...]
    to_ask: tuple[str, ...]
    steps: int | None
    lm_calls: int | None
    done: bool


def plan(recipe: EvalRecipe, run: Run) -> EvalPlan:
    """What `leret.evaluation.stage.evaluate` would do; writes nothing.

    Args:
        recipe: what to evaluate.
        run: a sampled run.

    Raises:
        LeretError: as `evaluate` does, for what can be seen without a policy.
    """
    job = resolve(recipe, run)
    before = finished(job)
    if before is not None:
        names = tuple(system.name for system in job.systems)
        return EvalPlan(before["n_questions"], names, (), before["n_hops"], 0, True)
    with Environment.open(run) as bench:
        refuse_changed_files(run, bench)
        questions, data = held_out(recipe, run, bench)
        job = on_data(job, data)
        steps = steps_of(bench.replay, bench.formatter.signature)
        evaluator = open_evaluator(job, bench, questions, Silent()) if _has_index(bench) else None
        runs = {system.name: _n_missing(job, evaluator, len(questions), system.name) for system in job.systems}
    n_calls = sum(runs[system.name] for system in job.systems if system.prompt is not None)
    return EvalPlan(
        questions=len(questions),
        systems=tuple(runs),
        to_ask=tuple(name for name, n in runs.items() if n),
        steps=steps,
        lm_calls=None if steps is None else steps * n_calls,
        done=False,
    )


def _n_missing(job: Job, evaluator: Evaluator | None, n_questions: int, name: str) -> int:
    """Runs that a system lacks; without an index, nothing can have been evaluated over it."""
    system = next(system for system in job.systems if system.name == name)
    if evaluator is None:
        samples = job.recipe.samples if system.prompt is not None and job.recipe.temperature > 0 else 1
        return n_questions * samples
    return sum(map(len, evaluator.missing(system)[1].values()))


def _has_index(bench: Environment) -> bool:
    """Opening the retriever would build an index that is not there."""
    settings = bench.recipe.retriever
    kind = settings.index_kind
    return kind is None or (Path(settings.index) if settings.index else bench.cache / kind).is_dir()
