"""Running one system with an LM over many questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from leret.core.errors import LeretError, PolicyError, ProgramError, RetrievalError
from leret.core.types import Rollout, Task
from leret.evaluation.results import Hop, Trace
from leret.policies.base import Policy
from leret.programs.prompts import Formatter, Prompt
from leret.programs.replay import Replay
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.sampling.rollouts.rollout import RolloutRunner

CONCURRENCY: Final = 256
"""Questions in flight: what waits together is decoded together."""

_MIN_RUNS: Final = 50
_MAX_FAILED: Final = 0.5
"""Where more than half of at least fifty runs failed, the cause is not in the questions."""

_BOUNDARY: Final[Mapping[str, type[LeretError]]] = {"retrieval": RetrievalError, "program": ProgramError}


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


async def run_policy(
    setting: EvaluationSetup,
    policy: Policy,
    prompt: Prompt,
    todo: Mapping[int, Sequence[Task]],
    on_trace: Callable[[Trace], None],
    n_done: int = 0,
) -> None:
    """Run every question, and hand over each trace as it ends.

    Args:
        setting: program, retriever and sampling.
        policy: writes the completions; left open.
        prompt: of the bank, or zero-shot.
        todo: questions by sample.
        on_trace: called in this thread. What was handed over before an error or an interruption stays good.
        n_done: runs that an earlier call did.

    Raises:
        PolicyError, RetrievalError, ProgramError: more than half of the runs failed of this.
    """
    watch = _Watch(sum(len(questions) for questions in todo.values()), n_done)
    front = SearchBatcher(setting.retriever)
    roller = RolloutRunner(
        setting.replay,
        setting.formatter,
        policy,
        front,
        max_tokens=setting.max_tokens,
        temperature=setting.temperature,
        top_p=setting.top_p,
        seed=setting.seed,
    )
    try:
        for sample, questions in todo.items():

            def done(rollout: Rollout, sample: int = sample) -> None:
                on_trace(trace_of(rollout, sample))
                watch.see(rollout)

            await roller.run(questions, prompt, sample=sample, concurrency=CONCURRENCY, on_done=done)
    finally:
        front.close()


def trace_of(rollout: Rollout, sample: int) -> Trace:
    """A rollout as evaluation keeps it. Only a completion that does not parse is no failure."""
    failure = rollout.failure
    unparsed = failure is not None and failure.kind == "parse"
    return Trace(
        rollout.question_id,
        tuple(Hop(_query(hop.outputs), hop.completion, hop.ranking) for hop in rollout.hops),
        sample,
        failure=f"{failure.kind}: {failure.message}" if failure is not None and not unparsed else None,
        unparsed=unparsed,
    )


def _query(outputs: Mapping[str, Any] | None) -> str | None:
    """The last field: what a predictor reasons comes before what it answers."""
    if not outputs:
        return None
    value = list(outputs.values())[-1]
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class _Watch:
    """Stops an evaluation that failures have made pointless."""

    def __init__(self, n_runs: int, n_before: int) -> None:
        self._n_runs = n_runs
        self._n_before = n_before
        self._n_done = 0
        self._failures: Counter[str] = Counter()

    def see(self, rollout: Rollout) -> None:
        """Count a run.

        Raises:
            PolicyError, RetrievalError, ProgramError: too many failed.
        """
        self._n_done += 1
        failure = rollout.failure
        if failure is None or failure.kind == "parse":
            return
        self._failures[failure.kind] += 1
        n_failed = self._failures.total()
        n_all = self._n_done + (self._n_before if failure.kind == "prompt" else 0)  # which fails at every call again
        if n_failed > _MAX_FAILED * n_all and self._n_done >= min(_MIN_RUNS, self._n_runs):
            raise _BOUNDARY.get(failure.kind, PolicyError)(
                f"{n_failed} of {n_all} runs failed, so the evaluation stopped; the last one: "
                f"{failure.message}. What is done is kept: mend the cause and run the same command again"
            )
