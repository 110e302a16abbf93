"""Sampling many questions at once: each walks its own path, none waits for another.

A question goes from state to state: all samples of the state, the choice of the one that goes on, the next state.
The store is asked at every step for what is there already, so a run goes on wherever it was stopped, and a run that
was stopped equals one that was not. A question whose samples met an outage waits at that state for the next resume.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from leret.core.aio import for_each
from leret.core.errors import LeretError, PolicyError, ProgramError, RetrievalError, RunError
from leret.core.memory import gc_frozen
from leret.core.progress import Progress, Silent
from leret.core.types import Failure, Sample, Task
from leret.programs.replay import Finished, NeedsCompletion
from leret.programs.runner import MAX_STEPS, Known, ProgramRunner
from leret.sampling.rollouts.branching import Here, StateSampler
from leret.sampling.rollouts.rollout import failure_of
from leret.sampling.rollouts.selection import select_next
from leret.sampling.store.schema import PathStep
from leret.sampling.store.store import Store

_MIN_SAMPLES, _MIN_UNPARSED = 50, 5
"""Samples before the share of failures means anything; before it does where none parses."""

_SAVE_S = 0.2
"""Seconds that a sample waits for its commit, at most."""

_WAIT = ("policy", "retrieval")
"""Outages that end by themselves, so that waiting for the next resume pays."""

_BOUNDARY: dict[str, type[LeretError]] = {"retrieval": RetrievalError, "program": ProgramError}


@dataclass
class SamplingStats:
    """What this session did.

    Attributes:
        waiting: questions that met an outage, and go on at the next resume.
    """

    questions: int = 0
    samples: int = 0
    reward_sum: float = 0.0
    n_rewarded: int = 0
    waiting: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    last_failure: Failure | None = None
    last_unparsed: Failure | None = None

    @property
    def mean_reward(self) -> float:
        """Of the samples that have one."""
        return self.reward_sum / self.n_rewarded if self.n_rewarded else 0.0

    @property
    def n_failed(self) -> int:
        """Failures that say nothing about a completion."""
        return self.failures.total() - self.failures["parse"]

    def count(self, samples: Sequence[Sample]) -> None:
        """Take note of the samples of one state."""
        self.samples += len(samples)
        for sample in samples:
            if sample.failure is not None:
                self.fail(sample.failure)
            elif sample.reward is not None:
                self.reward_sum += sample.reward
                self.n_rewarded += 1

    def add(self, other: SamplingStats) -> None:
        """Add what another session did."""
        for name in ("questions", "samples", "reward_sum", "n_rewarded", "waiting"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures.update(other.failures)
        self.last_failure = other.last_failure or self.last_failure
        self.last_unparsed = other.last_unparsed or self.last_unparsed

    def fail(self, failure: Failure) -> None:
        """Take note of a failure."""
        self.failures[failure.kind] += 1
        if failure.kind == "parse":
            self.last_unparsed = failure
        else:
            self.last_failure = failure


class Scheduler:
    """Samples questions into a store.

    Args:
        stepper: the program.
        brancher: makes the samples of a state.
        store: where they go.
        policy_digest: of the brancher's policy.
        seed: of the choice of the next state.
        max_error_rate: share of samples that failed otherwise than by parsing that stops the run; None never.
        max_unparsed_rate: share of samples outside the adapter's format that stops it as well.
        facts: more to tell with the progress.
    """

    def __init__(
        self,
        stepper: ProgramRunner,
        brancher: StateSampler,
        store: Store,
        policy_digest: str,
        *,
        seed: int,
        max_error_rate: float | None,
        max_unparsed_rate: float = 1.0,
        facts: Callable[[], Mapping[str, float | int | str]] = dict,
    ) -> None:
        self._stepper = stepper
        self._brancher = brancher
        self._store = store
        self._policy_digest = policy_digest
        self._seed = seed
        self._max_error_rate = max_error_rate
        self._max_unparsed_rate = max_unparsed_rate
        self._facts = facts
        self._begun: set[str] = set()

    async def run(self, questions: Iterable[Task], concurrency: int, progress: Progress | None = None) -> SamplingStats:
        """Sample every question to the end of its path.

        Args:
            questions: taken one by one; those that are done already cost nothing.
            concurrency: questions in flight.
            progress: hears of every question that ends.

        Raises:
            PolicyError, RetrievalError, ProgramError: more than ``max_error_rate`` failed; what is there is kept.
            RunError: the store cannot be written; what is there is kept.
        """
        progress = progress or Silent()
        done = self._store.done(self._policy_digest)
        self._begun = self._store.begun(self._policy_digest)
        tally = SamplingStats()

        async def one(question: Task) -> None:
            await self._walk(question, tally)
            tally.questions += 1
            progress.advance(
                1,
                mean_reward=tally.mean_reward,
                failures=tally.failures.total(),
                samples=tally.samples,
                **self._facts(),
            )

        saving = asyncio.create_task(self._save_now_and_then())
        try:
            with gc_frozen():
                await for_each((question for question in questions if question.id not in done), one, concurrency)
        finally:
            saving.cancel()
            self._store.flush()
        self._check(tally, last=True)
        return tally

    async def _save_now_and_then(self) -> None:
        """Commit what waits though nothing new comes, so that a kill never loses more than a moment's samples."""
        while True:
            await asyncio.sleep(_SAVE_S)
            with suppress(RunError):  # what could not be written is kept, and whoever puts the next sample is told
                self._store.flush()

    async def _walk(self, question: Task, tally: SamplingStats) -> None:
        """One question, from its first state to the end of its path or to an outage."""
        known: Known = {}
        fresh = question.id not in self._begun
        visits = {} if fresh else {v.step: v for v in self._store.visits(self._policy_digest, question.id)}
        try:
            need = await self._stepper.advance(question, (), known)
            place = _Place(question, need, (), known, None, fresh)
            while isinstance(place.need, NeedsCompletion):
                further = await self._step(place, place.need, visits.get(len(place.outputs)), tally)
                if further is None:
                    return
                place = further
        except (RetrievalError, ProgramError) as error:
            tally.fail(failure_of(error))
            tally.waiting += 1
            self._check(tally)

    async def _step(
        self, place: _Place, need: NeedsCompletion, before: PathStep | None, tally: SamplingStats
    ) -> _Place | None:
        """Sample one state and go on from it; None where the path ends or waits."""
        question, step = place.question, len(place.outputs)
        if step == MAX_STEPS:
            raise ProgramError(f"question {question.id}: the program asks for more than {MAX_STEPS} completions")
        state = self._stepper.state(question, need, step, place.parent)
        self._store.put_state(state)
        samples = await self._brancher.samples(Here(question, state, place.outputs, place.known, place.fresh))
        tally.count(samples)
        self._check(tally)
        if before is not None and before.state_id == state.id:
            chosen = next((sample for sample in samples if sample.id == before.chosen), None)
        elif any(sample.failure and sample.failure.kind in _WAIT for sample in samples):
            tally.waiting += 1  # choosing among the others would make this run another one than without the outage
            return None
        else:
            chosen = select_next(samples, question, self._seed, state.id)
        name = None if chosen is None else chosen.id
        visit = PathStep(question.id, step, self._policy_digest, state.id, place.parent, name, "")
        if chosen is None:
            solved = any(question.is_solved_by(sample.doc_ids) for sample in samples)
            self._store.put_visit(replace(visit, outcome="solved" if solved else "stuck"))
            return None
        outputs = (*place.outputs, self._stepper.formatter.parse(state.predictor, chosen.completion or "") or {})
        further = await self._stepper.advance(question, outputs, place.known)
        self._store.put_visit(replace(visit, outcome="next" if isinstance(further, NeedsCompletion) else "finished"))
        return _Place(question, further, outputs, place.known, chosen.id, place.fresh)

    def _check(self, tally: SamplingStats, last: bool = False) -> None:
        if self._max_error_rate is not None:
            refuse_failures(tally, self._max_error_rate, self._max_unparsed_rate, last)


def refuse_failures(tally: SamplingStats, max_error_rate: float, max_unparsed_rate: float, last: bool = False) -> None:
    """Stop where too much fails, or where everything did.

    Args:
        tally: so far.
        max_error_rate: share of failed samples that is let pass.
        max_unparsed_rate: share of samples outside the adapter's format that is let pass.
        last: nothing comes after.

    Raises:
        PolicyError, RetrievalError, ProgramError: of the kind of the last failure.
    """
    n_failed, n_all = tally.n_failed, tally.samples
    if tally.last_unparsed is not None and n_all >= _MIN_SAMPLES:
        refuse_unparsed([tally.last_unparsed], tally.failures["parse"], n_all, max_unparsed_rate)
    too_many = n_all >= _MIN_SAMPLES and n_failed > max_error_rate * n_all
    nothing = last and n_failed > 0 and tally.n_rewarded == 0
    if tally.last_failure is None or not (too_many or nothing):
        return
    allowed = f"more than sampling.max_error_rate = {max_error_rate:g} allows" if too_many else "and no reward"
    again = "name a new run directory" if tally.last_failure.kind == "prompt" else "run the same command again"
    error = _BOUNDARY.get(tally.last_failure.kind, PolicyError)(
        f"{n_failed} failures in {n_all} samples, {allowed}; the last one: {tally.last_failure.message}. "
        f"What is done is kept: mend the cause and {again}"
    )
    raise error if isinstance(error, ProgramError) else error.failed()


def refuse_unparsed(failures: Iterable[Failure], n_unparsed: int, n_samples: int, max_unparsed_rate: float) -> None:
    """Stop where too many completions do not parse; of fewer than fifty, where none of five or more does.

    Raises:
        PolicyError: with the first of ``failures``.
    """
    enough = n_samples >= _MIN_SAMPLES or n_samples == n_unparsed >= _MIN_UNPARSED
    if enough and n_unparsed > max_unparsed_rate * n_samples:
        raise PolicyError(
            f"{n_unparsed} of {n_samples} completions do not parse; one of them: {next(iter(failures)).message}; "
            "correct program.adapter, policy.model or policy.max_tokens and name a new run directory, or raise "
            "sampling.max_unparsed_rate"
        )


@dataclass(frozen=True)
class _Place:
    """Where a question's path has come to."""

    question: Task
    need: NeedsCompletion | Finished
    outputs: tuple[dict[str, Any], ...]
    known: Known
    parent: str | None
    fresh: bool
