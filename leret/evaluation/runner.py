"""Running one system over many questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from leret.core.errors import PolicyError
from leret.core.types import Rollout, Task
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.programs.runner import ProgramRunner
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.sampling.rollouts.rollout import BOUNDARIES, Actor, RolloutRunner

CONCURRENCY = 256
"""Questions in flight: what waits together is decoded together."""

_MIN_RUNS = 50
_MAX_FAILED = 0.5
"""Where more than half of at least fifty runs failed, the cause is not in the questions."""


@dataclass(frozen=True)
class EvaluationSetup:
    """A program over a retriever, and how completions are asked for.

    Attributes:
        samples: runs a question; 1 where ``temperature`` is 0, since all would be the same.
    """

    replay: Replay
    formatter: Formatter
    retriever: Retriever
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    seed: int = 0


async def run_system(
    setup: EvaluationSetup,
    retriever: Retriever,
    actor: Actor,
    todo: Mapping[int, Sequence[Task]],
    on_rollout: Callable[[Rollout], None],
    n_before: int = 0,
) -> None:
    """Run every question."""
    searches = SearchBatcher(retriever)
    runner = RolloutRunner(ProgramRunner(setup.replay, setup.formatter, searches), actor)
    n_runs, n_done, failures = sum(map(len, todo.values())), 0, Counter[str]()

    def done(rollout: Rollout) -> None:
        nonlocal n_done
        on_rollout(rollout)
        n_done += 1
        failure = rollout.failure
        if failure is None or failure.kind == "parse":
            return
        failures[failure.kind] += 1
        n_failed = failures.total()
        n_all = n_done + (n_before if failure.kind == "prompt" else 0)  # which fails at every call again
        if n_failed > _MAX_FAILED * n_all and n_done >= min(_MIN_RUNS, n_runs):
            raise BOUNDARIES.get(failure.kind, PolicyError)(
                f"{n_failed} of {n_all} runs failed, so the evaluation stopped; the last one: "
                f"{failure.message}. What is done is kept: correct the cause and run the same command again"
            )

    try:
        for index, tasks in todo.items():
            await runner.run(tasks, index=index, concurrency=CONCURRENCY, on_done=done)
    finally:
        searches.close()
