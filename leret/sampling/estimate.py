"""Estimating the work and cost of a sampling run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from leret.config.base import resolve_paths
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ProgramError
from leret.core.runs import Run
from leret.core.types import Ranking, Task
from leret.programs.needs import Finished, Step
from leret.programs.replay import SearchResults
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.rewards import scoring
from leret.rollouts.environment import Environment
from leret.rollouts.states import LOOKED_AT
from leret.sampling.bank.bank import n_bank_questions, n_candidates
from leret.sampling.store.store import Store

_LARGE_SHARE = 0.4


@dataclass(frozen=True)
class SampleEstimate:
    """Estimated maximum work of a sampling run.

    Attributes:
        steps: LM calls per program run; None if unknown without an LM.
        lm_calls: completions, including completions for the prompt bank.
        bank_share: share of the prompt bank in ``lm_calls``.
        stored_samples: samples in the store, from all policies.
    """

    questions: int
    steps: int | None
    states: int | None
    samples: int | None
    bank_calls: int | None
    lm_calls: int | None
    stored_samples: int
    bank_ready: bool
    notes: Sequence[str] = ()
    bank_share: float = 0.0


def estimate(recipe: SamplingRecipe, run: Run) -> SampleEstimate:
    """Estimate the work of `sample` with these arguments. Write nothing; the run need not exist."""
    environment = Environment(resolve_paths(recipe, Path.cwd()), run.cache)
    settings = recipe.sampling
    for spec in settings.rewards:
        scoring(spec, "sampling.reward")
    n_questions = len(environment.tasks(recipe.data.split, recipe.data.limit, recipe.data.part))
    steps = steps_of(environment)
    no_bootstrap = settings.n_few_shot == 0 or settings.bank.path is not None
    bank_ready = no_bootstrap or (run.manifest_path.is_file() and run.manifest.bank is not None)
    n_stored = 0
    if run.store.is_file():
        with Store(run.store, read_only=True) as store:
            n_stored = store.counts()["samples"]
    if steps is None:
        n_bank = 0 if bank_ready else None
        return SampleEstimate(
            n_questions, None, None, None, n_bank, None, n_stored, bank_ready, environment.notes()
        )
    n_train, n_dev = n_bank_questions(
        n_questions, settings.bank.train_questions, settings.bank.dev_questions
    )
    candidates = n_candidates(settings, n_questions)
    bank_calls = 0 if bank_ready else steps * (n_train + candidates * n_dev)
    states = n_questions * steps
    samples = states * settings.prompts * settings.samples
    to_end = settings.credit != "step" and (
        settings.credit != "auto" or bool(environment.replay.stops)
    )
    n_on = settings.n_continuations * to_end
    # a sample continues for half of the other steps on average
    more = samples * n_on * (steps - 1) // 2
    if settings.credit == "auto" and len(environment.replay.names) > 1:
        more += min(LOOKED_AT, n_questions) * steps
    n_calls = samples + more + bank_calls
    share = bank_calls / max(1, n_calls)
    notes = [*environment.notes(), *_bank_notes(share, candidates)]
    counts = (n_questions, steps, states, samples, bank_calls, n_calls, n_stored, bank_ready)
    return SampleEstimate(*counts, notes, round(share, 2))


def _bank_notes(share: float, n_candidates: int) -> list[str]:
    if share <= _LARGE_SHARE:
        return []
    return [
        f"the prompt bank takes {share:.0%} of the LM calls; lower sampling.bank.candidates (now {n_candidates}), or "
        "set sampling.prompts: 1"
    ]


class _NoPassages:
    """A retriever that finds nothing."""

    digest = "none"

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        return [()] * len(queries)


def steps_of(environment: Environment) -> int | None:
    """Count LM calls in a program run with made-up outputs and empty rankings.

    None if the program fails on them, or an output has an unusual type.
    """

    async def run() -> int | None:
        with closing(SearchBatcher(_NoPassages())) as searches:
            return await _n_steps(environment.runner(searches))

    return asyncio.run(run())


async def _n_steps(runner: ProgramRunner) -> int | None:
    task = Task.question("?", "?")
    results: SearchResults = {}
    steps: list[Step] = []
    while True:
        try:
            need = await runner.advance(task, steps, results)
        except ProgramError:
            return None
        if isinstance(need, Finished):
            return len(steps)
        if need.choice is not None:
            steps.append(runner.formatter.step(need, need.choice.candidates[0].id))
            continue
        if need.call.signature is None:
            return None
        outputs = {}
        for name, info in need.call.signature.output_fields.items():
            outputs[name] = _made_up(info.annotation, f"? {len(steps)}")
        if None in outputs.values():
            return None
        steps.append(Step(need.call, [outputs]))


def _made_up(kind: Any, text: str) -> Any:
    """Return a value of an output's type; None if no plain value fits the type."""
    values: Sequence[Any] = [text, 1, [text, text], [1, 1], {text: text}]
    if get_origin(kind) is Literal:
        values = get_args(kind)
    for value in values:
        with suppress(ValidationError, PydanticUserError):
            return TypeAdapter(kind).validate_python(value)
    return None
