"""Sampling many questions concurrently, each on its own path.

Every step first looks up stored samples, so a stopped and resumed run gives the same result as an
uninterrupted run. If samples of a question fail in an outage, the question waits at that state
until the run is resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

import dspy

from leret.core.aio import for_each
from leret.core.errors import ProgramError, RunError
from leret.core.memory import gc_frozen
from leret.core.progress import Progress
from leret.core.types import Task
from leret.programs.needs import Finished, NeedsCompletion, Step
from leret.programs.replay import SearchResults
from leret.programs.runner import ProgramRunner
from leret.rollouts.failures import SamplingStats, refuse_failures
from leret.rollouts.selection import select_next
from leret.rollouts.states import StateSampler
from leret.rollouts.walk import Point, begin, walk
from leret.sampling.store.store import PathStep, Store

_CHECKED = 4
_SAVE_S = 0.2  # maximum seconds from a sample to its commit
_WAIT = ("policy", "retrieval")


@dataclass
class Scheduler:
    """Samples tasks into a store.

    ``max_error_rate`` is the maximum share of failed samples, not counting unparsed completions;
    ``max_unparsed_rate`` is the maximum share of unparsed completions. ``check_path`` checks the
    first tasks' paths.
    """

    runner: ProgramRunner
    sampler: StateSampler
    store: Store
    seed: int
    max_error_rate: float
    max_unparsed_rate: float
    check_path: Callable[[Task, Sequence[Step], SearchResults], Awaitable[None]]
    usage_now: Callable[[], Mapping[str, float | int | str]] = dict
    _n_searches: list[int] = field(default_factory=list)

    async def run(
        self, tasks: Iterable[Task], concurrency: int, progress: Progress | None = None
    ) -> SamplingStats:
        """Sample every unfinished task to the end of its path, ``concurrency`` tasks at a time."""
        progress = progress or Progress()
        done = self.store.done(self.sampler.policy_digest)
        stats = SamplingStats(policy_digest=self.sampler.policy_digest)

        async def sample(task: Task, check: bool = False) -> None:
            await self._walk(task, stats, check)
            stats.questions += 1
            counts = {"failures": stats.failures.total(), "samples": stats.samples}
            progress.advance(1, mean_reward=stats.mean_reward, **counts, **self.usage_now())

        saving = asyncio.create_task(self._save_repeatedly())
        try:
            with gc_frozen():
                rest = (task for task in tasks if task.id not in done)
                checked = islice(rest, _CHECKED)
                await for_each(checked, partial(sample, check=True), concurrency)
                self._refuse_unseen_searches()
                await for_each(rest, sample, concurrency)
        finally:
            saving.cancel()
            self.store.flush()
        self._check(stats, last=True)
        return stats

    async def _save_repeatedly(self) -> None:
        """Commit repeatedly, so that a killed run loses at most the samples of the last moment."""
        while True:
            await asyncio.sleep(_SAVE_S)
            with suppress(RunError):  # rows stay in memory, and the next sample raises the error
                self.store.flush()

    async def _walk(self, task: Task, stats: SamplingStats, check: bool) -> None:
        stored = self.store.visits(self.sampler.policy_digest, task.id)
        visits = {visit.step: visit for visit in stored}
        start = begin(self.runner, task, check=check)
        path = await walk(start, partial(self._visit, stats, visits))
        if path.failure is not None:
            stats.fail(path.failure)
            stats.waiting += 1
        self._check(stats)
        if not check or path.failure is not None:
            return
        end = path.points[-1]
        self._note_unlisted(end.steps, stats)
        if isinstance(end.need, Finished):
            self._n_searches.append(len(end.need.searches))
            if self.sampler.credits != {"final"}:
                self._note_unseen(task, end.need, stats)
        await self.check_path(task, end.steps, end.results)

    async def _visit(
        self, stats: SamplingStats, visits: Mapping[int, PathStep], point: Point
    ) -> Point | None:
        assert isinstance(point.need, NeedsCompletion)
        task = point.task
        step = len(point.steps)
        state = self.runner.state(task, point.need, step, point.parent)
        self.store.put_state(state)
        samples = await self.sampler.sample_state(point, state)
        stats.count(samples)
        before = visits.get(step)
        if before is not None and before.state_id == state.id:
            chosen = next((sample for sample in samples if sample.id == before.chosen), None)
        elif any(sample.failure and sample.failure.kind in _WAIT for sample in samples):
            stats.waiting += 1  # a choice without the failed samples would change the run's result
            return None
        else:
            to_end = bool(self.sampler.credits - {"step"})
            chosen = select_next(samples, task, self.seed, state.draw, through_solved=to_end)
        following = None
        if chosen is not None:
            following = await self.sampler.next_point(point, chosen)
        if following is not None:
            outcome = "next" if isinstance(following.need, NeedsCompletion) else "finished"
        elif any(task.is_solved_by(sample.doc_ids) for sample in samples):
            outcome = "solved"
        else:
            outcome = "stuck"
        visit = PathStep(
            question_id=task.id,
            step=step,
            policy_digest=self.sampler.policy_digest,
            state_id=state.id,
            parent=point.parent,
            chosen=None if chosen is None else chosen.id,
            outcome=outcome,
        )
        self.store.put_visit(visit)
        return following

    def _note_unlisted(self, steps: Sequence[Step], stats: SamplingStats) -> None:
        unlisted = {step.call.predictor for step in steps} - {*self.runner.replay.names, "(direct)"}
        for name in sorted(unlisted):
            note = (
                f"{name} is not sampled because named_predictors() does not list it; "
                "to train it, store it on the program, as an attribute or in a list or dict"
            )
            if note not in stats.notes:
                stats.notes.append(note)

    def _note_unseen(self, task: Task, end: Finished, stats: SamplingStats) -> None:
        program = type(self.runner.replay.program).__name__
        wrap = "wrap every search with leret.search_tool(fn), or set sampling.credit: final"
        unseen = unseen_documents(end)
        ids = unseen.pop("doc_ids", None)
        if ids:
            raise ProgramError(
                f"{program} returns doc_ids that no search seen by leret found, "
                f"such as {ids[0]!r} (task {task.id}), so the reward would ignore them; {wrap}"
            )
        for name, texts in unseen.items():
            start = f"{program} returns {name} "
            if any(note.startswith(start) for note in stats.notes):
                continue
            stats.notes.append(
                f"{start}that no search seen by leret found, such as {texts[0]!r:.80}; "
                f"{wrap}, else the reward ignores them"
            )

    def _refuse_unseen_searches(self) -> None:
        if self.sampler.credits == {"final"} or not self._n_searches or any(self._n_searches):
            return
        program = self.runner.replay.program
        first = f"first {len(self._n_searches)} tasks"
        for _, module in program.named_sub_modules():
            tools = getattr(module, "tools", None)
            if isinstance(tools, dict):
                raise ProgramError(
                    f"{type(program).__name__} called no search tool in the {first} "
                    f"(tools: {', '.join(tools)}). "
                    "If a tool searches without leret.Search, wrap it with leret.search_tool(fn). "
                    "If the LM never calls the search tool, add demos or a teacher, "
                    "choose a different LM, or set sampling.credit: final"
                )
        raise ProgramError(
            f"{type(program).__name__} made no search visible to leret in the {first}; wrap the program's search with "
            "leret.search_tool(fn), or set sampling.credit: final"
        )

    def _check(self, stats: SamplingStats, last: bool = False) -> None:
        refuse_failures(stats, self.max_error_rate, self.max_unparsed_rate, last)


def unseen_documents(end: Finished) -> dict[str, list[str]]:
    """Return, by field, a prediction's documents that are in no recorded search result.

    In fields other than ``doc_ids``, ``context`` and ``passages``, a list counts only if an item of
    it was retrieved.
    """
    unseen: dict[str, list[str]] = {}
    if not isinstance(end.prediction, dspy.Example):
        return unseen
    texts = [(passage.doc_id, passage.title, passage.text) for passage in end.ranking]
    seen = set(filter(None, chain.from_iterable(texts)))
    for name, value in end.prediction.items():
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            continue
        unknown = []
        for item in value:
            quotes_a_passage = name != "doc_ids" and any(text in item for text in seen)
            if item not in seen and not quotes_a_passage:
                unknown.append(item)
        if unknown and (name in ("doc_ids", "context", "passages") or len(unknown) < len(value)):
            unseen[name] = unknown
    return unseen
