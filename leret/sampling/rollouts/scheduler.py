"""Sampling many questions at once: each walks its own path, none waits for another.

A question goes from state to state: all samples of the state, the choice of the one that goes on, the next state.
The store is asked at every step for what is there already, so a run goes on wherever it was stopped, and a run that
was stopped equals one that was not. A question whose samples met an outage waits at that state for the next resume.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, pairwise

import dspy

from leret.core.aio import for_each, gathered
from leret.core.dspy_internals import AdapterParseError
from leret.core.errors import PolicyError, ProgramError, RetrievalError, RunError
from leret.core.memory import gc_frozen
from leret.core.progress import Progress, Silent
from leret.core.types import Failure, Sample, Task
from leret.programs.needs import Finished, NeedsCompletion, Step
from leret.programs.replay import SearchResults
from leret.programs.runner import ProgramRunner
from leret.sampling.rollouts.branching import BranchPoint, StateSampler
from leret.sampling.rollouts.rollout import BOUNDARIES, failure_of
from leret.sampling.rollouts.selection import select_next
from leret.sampling.store.schema import PathStep
from leret.sampling.store.store import Store

_MIN_SAMPLES, _MIN_UNPARSED = 50, 5
"""Samples before the share of failures means anything; before it does where none parses."""

_CHECKED = 4
"""Tasks whose paths are checked before all others are sampled."""

LOOKED_AT = 8
"""Tasks that the program is run on to see which predictors a search follows."""

_SAVE_S = 0.2
"""Seconds that a sample waits for its commit, at most."""

_WAIT = ("policy", "retrieval")
"""Outages that end by themselves, so that waiting for the next resume pays."""


@dataclass
class SamplingStats:
    """What this session did.

    Attributes:
        waiting: questions that met an outage, and go on at the next resume.
        policy_digest: what the store keeps this session's samples by, see `StateSampler`.
        notes: predictors that are not sampled, and why.
    """

    questions: int = 0
    samples: int = 0
    reward_sum: float = 0.0
    n_rewarded: int = 0
    waiting: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    last_failure: Failure | None = None
    last_unparsed: Failure | None = None
    policy_digest: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def mean_reward(self) -> float:
        """Of the samples that have one."""
        return self.reward_sum / self.n_rewarded if self.n_rewarded else 0.0

    @property
    def n_failed(self) -> int:
        """Failures that say nothing about a completion."""
        return self.failures.total() - self.failures["parse"]

    def count(self, samples: Sequence[Sample]) -> None:
        self.samples += len(samples)
        for sample in samples:
            if sample.failure is not None:
                self.fail(sample.failure)
            elif sample.reward is not None and sample.is_sampled:
                self.reward_sum += sample.reward
                self.n_rewarded += 1

    def add(self, other: SamplingStats) -> None:
        for name in ("questions", "samples", "reward_sum", "n_rewarded", "waiting"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures.update(other.failures)
        self.last_failure = other.last_failure or self.last_failure
        self.last_unparsed = other.last_unparsed or self.last_unparsed
        self.policy_digest = other.policy_digest or self.policy_digest
        self.notes = list(dict.fromkeys([*self.notes, *other.notes]))

    def fail(self, failure: Failure) -> None:
        self.failures[failure.kind] += 1
        if failure.kind == "parse":
            self.last_unparsed = failure
        else:
            self.last_failure = failure


@dataclass
class Scheduler:
    """Samples tasks into a store.

    Attributes:
        seed: of the choice of the next state.
        max_error_rate: share of samples that failed otherwise than by parsing that stops the run; None never.
        max_unparsed_rate: share of samples outside the adapter's format that stops it as well.
        check_path: refuses a program that does not come to the same place again, or sends other messages; gets the
            first tasks' paths, which are sampled before all others.
        facts: further facts for the progress line.
    """

    runner: ProgramRunner
    sampler: StateSampler
    store: Store
    seed: int
    max_error_rate: float | None
    max_unparsed_rate: float = 1.0
    check_path: Callable[[Task, Sequence[Step], SearchResults], Awaitable[None]] | None = None
    facts: Callable[[], Mapping[str, float | int | str]] = dict
    _begun: set[str] = field(default_factory=set)
    _n_searches: list[int] = field(default_factory=list)

    async def run(self, tasks: Iterable[Task], concurrency: int, progress: Progress | None = None) -> SamplingStats:
        """Sample every task to the end of its path, ``concurrency`` at a time; what is done already costs nothing."""
        progress = progress or Silent()
        done = self.store.done(self.sampler.policy_digest)
        self._begun = self.store.begun(self.sampler.policy_digest)
        stats = SamplingStats(policy_digest=self.sampler.policy_digest)

        async def one(task: Task, check: bool = False) -> None:
            await self._walk(task, stats, check)
            stats.questions += 1
            counts = {"failures": stats.failures.total(), "samples": stats.samples}
            progress.advance(1, mean_reward=stats.mean_reward, **counts, **self.facts())

        saving = asyncio.create_task(self._save_repeatedly())
        try:
            with gc_frozen():
                rest = (task for task in tasks if task.id not in done)
                if self.check_path is not None:
                    await for_each(islice(rest, _CHECKED), partial(one, check=True), concurrency)
                    self._refuse_unseen_searches()
                await for_each(rest, one, concurrency)
        finally:
            saving.cancel()
            self.store.flush()
        self._check(stats, last=True)
        return stats

    async def _save_repeatedly(self) -> None:
        """Commit without new samples too, so that a kill never loses more than a moment's samples."""
        while True:
            await asyncio.sleep(_SAVE_S)
            with suppress(RunError):  # what could not be written is kept, and the next sample raises it
                self.store.flush()

    async def _walk(self, task: Task, stats: SamplingStats, check: bool) -> None:
        fresh = task.id not in self._begun
        path = {} if fresh else {step.step: step for step in self.store.visits(self.sampler.policy_digest, task.id)}
        results: SearchResults = {}
        try:
            need = await self.runner.advance(task, (), results, check)
            last = BranchPoint(task, need, results=results, fresh=fresh, check=check)
            point: BranchPoint | None = last
            while point is not None and isinstance(point.need, NeedsCompletion):
                last, point = point, await self._step(point, point.need, path.get(len(point.steps)), stats)
        except (RetrievalError, ProgramError) as error:
            self._check(stats)  # raises again what it has raised
            stats.fail(failure_of(error))
            stats.waiting += 1
            self._check(stats)
            return
        if check and point is not None:
            self._note_unlisted(point.steps, stats)
            self._n_searches.append(len(point.need.searches))
            if isinstance(point.need, Finished) and self.sampler.credits != {"final"}:
                self._note_unseen(task, point.need, stats)
        if check and self.check_path is not None:
            await self.check_path(task, last.steps if point is None else point.steps, results)

    async def _step(
        self, point: BranchPoint, need: NeedsCompletion, before: PathStep | None, stats: SamplingStats
    ) -> BranchPoint | None:
        """Sample one state and go on from it; None where the path ends or waits."""
        task, step = point.task, len(point.steps)
        state = self.runner.state(task, need, step, point.parent)
        self.store.put_state(state)
        samples = await self.sampler.sample_state(point, state)
        stats.count(samples)
        self._check(stats)
        if before is not None and before.state_id == state.id:
            chosen = next((sample for sample in samples if sample.id == before.chosen), None)
        elif any(sample.failure and sample.failure.kind in _WAIT for sample in samples):
            stats.waiting += 1  # choosing among the others would make this run another one than without the outage
            return None
        else:
            to_end = bool(self.sampler.credits - {"step"})
            chosen = select_next(samples, task, self.seed, state.draw, through_solved=to_end)
        following = None if chosen is None else await self.sampler.next_point(point, state, chosen)
        if following is not None:
            outcome = "next" if isinstance(following.need, NeedsCompletion) else "finished"
        else:
            outcome = "solved" if any(task.is_solved_by(sample.doc_ids) for sample in samples) else "stuck"
        name = None if chosen is None else chosen.id
        self.store.put_visit(PathStep(task.id, step, self.sampler.policy_digest, state.id, point.parent, name, outcome))
        return following

    def _note_unlisted(self, steps: Sequence[Step], stats: SamplingStats) -> None:
        """Note predictors that DSPy does not list, so that no LM of theirs can be trained."""
        for name in sorted({step.call.predictor for step in steps} - set(self.runner.replay.names)):
            note = f"{name} is answered and not sampled, since named_predictors() does not list it; to train it, keep "
            note += "it on the program, as an attribute or in a list or dict"
            if name != "(direct)" and note not in stats.notes:
                stats.notes.append(note)

    def _note_unseen(self, task: Task, end: Finished, stats: SamplingStats) -> None:
        """Refuse documents in the prediction that no search found which leret sees; of passages, only note it."""
        program, wrap = type(self.runner.replay.program).__name__, "wrap every search with leret.search_tool(fn)"
        unseen = unseen_documents(end)
        if ids := unseen.pop("doc_ids", None):
            raise ProgramError(
                f"{program} returns doc_ids that no search seen by leret found, such as {ids[0]!r} (task {task.id}), "
                f"so the reward would leave them out: {wrap}, or use credit final"
            )
        for name, texts in unseen.items():
            note = f"{program} returns {name} that no search seen by leret found, such as {texts[0]!r:.80}: {wrap}"
            if not any(known.startswith(f"{program} returns {name} ") for known in stats.notes):
                stats.notes.append(f"{note}, or use credit final, or the reward leaves them out")

    def _refuse_unseen_searches(self) -> None:
        """Stop where the reward is of searches, and the program came to its ends without one."""
        if self.sampler.credits == {"final"} or not self._n_searches or any(self._n_searches):
            return
        program, first = self.runner.replay.program, f"first {len(self._n_searches)} tasks"
        agents = [module for _, module in program.named_sub_modules() if isinstance(getattr(module, "tools", 0), dict)]
        if agents:
            raise ProgramError(
                f"{type(program).__name__} called no tool that leret sees searching in its {first}; its tools are "
                f"{', '.join(agents[0].tools)}. Where its search is not among leret.Search and leret.search_tool(fn), "
                "wrap it; else its LM calls none: give it demos or a teacher, another LM, or use credit final"
            )
        raise ProgramError(
            f"{type(program).__name__} made no search that leret sees in its {first}: wrap the program's search with "
            "leret.search_tool(fn), or use credit final"
        )

    def _check(self, stats: SamplingStats, last: bool = False) -> None:
        if self.max_error_rate is not None:
            refuse_failures(stats, self.max_error_rate, self.max_unparsed_rate, last)


def unseen_documents(end: Finished) -> dict[str, list[str]]:
    """Return what a prediction holds, by field, of documents that no search found which leret sees.

    Of ``doc_ids`` these are all unknown ones; of other lists of texts, those beside known passages, and all of
    ``context`` and ``passages``.
    """
    seen = {name for passage in end.ranking for name in (passage.doc_id, passage.title, passage.text) if name}
    found: dict[str, list[str]] = {}
    fields = dict(end.prediction.items()) if isinstance(end.prediction, dspy.Example) else {}
    for name, value in fields.items():
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            continue
        unseen = [one for one in value if one not in seen and (name == "doc_ids" or not any(t in one for t in seen))]
        if unseen and (name in ("doc_ids", "context", "passages") or len(unseen) < len(value)):
            found[name] = unseen
    return found


async def predictors_searched(runner: ProgramRunner, sampler: StateSampler, tasks: Iterable[Task]) -> dict[str, bool]:
    """Whether a search follows each predictor, before the next LM call: seen on one path of each of the first tasks.

    A completion that does not parse says nothing, nor does a task that fails; predictors that no path comes to are
    missing. Nothing is stored.

    Raises:
        LeretError: the program is not deterministic, or all tasks failed.
    """
    searched: dict[str, bool] = {}
    errors: list[PolicyError | RetrievalError | ProgramError] = []

    async def one(task: Task) -> list[BranchPoint]:
        results: SearchResults = {}
        try:
            need = await runner.advance(task, (), results, check=True)
            start = BranchPoint(task, need, results=results, check=True)
            return [point async for point in sampler.run_on(start, "look", task.id)]
        except (PolicyError, RetrievalError, ProgramError) as error:
            errors.append(error)
            return []

    paths = await gathered(one(task) for task in islice(tasks, LOOKED_AT))
    if paths and len(errors) == len(paths):
        raise errors[0].failed()
    for before, after in chain.from_iterable(map(pairwise, paths)):
        if isinstance(before.need, NeedsCompletion) and not isinstance(after.steps[-1].outputs, AdapterParseError):
            name, added = before.need.predictor, len(after.need.searches) > len(before.need.searches)
            searched[name] = searched.get(name, False) or added
    return dict(sorted(searched.items()))


def refuse_failures(stats: SamplingStats, max_error_rate: float, max_unparsed_rate: float, last: bool = False) -> None:
    """Stop where too much fails, or where everything did."""
    n_failed, n_all = stats.n_failed, stats.samples
    if stats.last_unparsed is not None and n_all >= _MIN_SAMPLES:
        refuse_unparsed([stats.last_unparsed], stats.failures["parse"], n_all, max_unparsed_rate)
    too_many = n_all >= _MIN_SAMPLES and n_failed > max_error_rate * n_all
    nothing = last and n_failed > 0 and stats.n_rewarded == 0
    if stats.last_failure is None or not (too_many or nothing):
        return
    allowed = f"more than sampling.max_error_rate = {max_error_rate:g} allows" if too_many else "and no reward"
    again = "name a new run directory" if stats.last_failure.kind == "prompt" else "run the same command again"
    error = BOUNDARIES.get(stats.last_failure.kind, PolicyError)(
        f"{n_failed} failures in {n_all} samples, {allowed}; the last one: {stats.last_failure.message}. "
        f"What is done is kept: mend the cause and {again}"
    )
    raise error if isinstance(error, ProgramError) else error.failed()


def refuse_unparsed(failures: Iterable[Failure], n_unparsed: int, n_samples: int, max_unparsed_rate: float) -> None:
    """Stop where too many completions do not parse; of fewer than fifty, where none of five or more does."""
    enough = n_samples >= _MIN_SAMPLES or n_samples == n_unparsed >= _MIN_UNPARSED
    if enough and n_unparsed > max_unparsed_rate * n_samples:
        raise PolicyError(
            f"{n_unparsed} of {n_samples} completions do not parse; one of them: {next(iter(failures)).message}; "
            "correct program.adapter, policy.model or policy.max_tokens and name a new run directory, or raise "
            "sampling.max_unparsed_rate"
        )
