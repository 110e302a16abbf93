"""Walking a program from state to state, for sampling, training, evaluation and rescoring."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from pydantic_core import to_jsonable_python

from leret.core.aio import for_each, started
from leret.core.errors import PolicyError, ProgramError, RetrievalError
from leret.core.types import Failure, Hop, LMCall, Outcome, Ranking, Rollout, Task, merge
from leret.programs.needs import PLAIN, Finished, NeedsCompletion, NeedsSearch, Step
from leret.programs.replay import SearchResults
from leret.programs.runner import ProgramRunner
from leret.programs.search import SearchCall
from leret.rollouts.actors import Actor
from leret.rollouts.failures import FAILURES, failure_of, unparsed

T = TypeVar("T")


class Reached(NamedTuple):
    """A completion's step, its outputs as JSON values, and a future for the program's next need."""

    step: Step
    outputs: Mapping[str, Any]
    end: asyncio.Future[NeedsCompletion | Finished]


@dataclass(slots=True)
class Point:
    """A point on a task's path through a program.

    Attributes:
        results: search results of the path; points reached from here share this mapping and add to
            it.
        parent: id of the sample that led here.
        check: whether to run each path several times and refuse a program that is not
            deterministic.
        finals: components of the final reward, averaged over continuations, keyed by the JSON of a
            step's outputs.
    """

    task: Task
    need: NeedsCompletion | Finished
    steps: tuple[Step, ...] = ()
    results: SearchResults = field(default_factory=dict)
    parent: str | None = None
    check: bool = False
    reached: dict[str, Reached] = field(default_factory=dict)
    finals: dict[str, asyncio.Task[dict[str, float]]] = field(default_factory=dict)

    def reach(self, runner: ProgramRunner, text: str, check: bool = False) -> Reached:
        """Start to run the program from a completion to its next need.

        Identical completions share one run.
        """
        reached = self.reached.get(text)
        if reached is None:
            assert isinstance(self.need, NeedsCompletion)
            step = runner.formatter.step(self.need, text)
            outputs: Mapping[str, Any] = {}
            if isinstance(step.outputs, list) and step.outputs:
                outputs = step.outputs[0]
            if any(type(value) not in PLAIN for value in outputs.values()):
                outputs = to_jsonable_python(outputs, fallback=str)
            path = (*self.steps, step)
            loop = asyncio.get_running_loop()
            end: asyncio.Future[NeedsCompletion | Finished] = loop.create_future()
            try:
                need = runner.replay.run(self.task, path, self.results, runner.retrieve, check)
            except Exception as error:
                end.set_exception(error)
                # marks it as retrieved: no asyncio warning if the session ends first
                end.exception()
            else:
                if isinstance(need, NeedsSearch):  # the search has no answer yet
                    end = started(runner.answer_search(need, self.task, path, self.results, check))
                else:
                    end.set_result(need)
            reached = Reached(step, outputs, end)
            self.reached[text] = reached
        return reached

    @property
    def unparsed(self) -> bool:
        return isinstance(self.need, Finished) and self.need.unparsed

    def outcome(self, deep: tuple[tuple[str, ...], ...] = ()) -> Outcome:
        """Return the outcome of the last step."""
        last = self.steps[-1]
        outputs: dict[str, Any] = {}
        if isinstance(last.outputs, list) and last.outputs:
            outputs = deepcopy(last.outputs[0])
        prediction = self.need.prediction if isinstance(self.need, Finished) else None
        ranking = merge(chain.from_iterable(search.added for search in self.need.searches))
        return Outcome(
            self.task, last.text or "", outputs, ranking, prediction, len(self.steps), deep
        )

    async def after(
        self, runner: ProgramRunner, step: Step | Reached, parent: str | None = None
    ) -> Point:
        if isinstance(step, Reached):
            path = (*self.steps, step.step)
            need = await step.end
        else:
            path = (*self.steps, step)
            need = await runner.advance(self.task, path, self.results, self.check)
        return Point(self.task, need, path, self.results, parent, self.check)


@dataclass(slots=True)
class Walk:
    """The points of a path, and the error that ended it early."""

    points: list[Point] = field(default_factory=list)
    error: PolicyError | RetrievalError | ProgramError | None = None

    @property
    def failure(self) -> Failure | None:
        if self.error is None:
            return None
        return failure_of(self.error)

    @property
    def end(self) -> Point:
        if self.error is not None:
            raise self.error
        return self.points[-1]


async def begin(runner: ProgramRunner, task: Task, *, check: bool = False) -> Point:
    """Run a program up to its first state."""
    results: SearchResults = {}
    need = await runner.advance(task, (), results, check)
    return Point(task, need, results=results, check=check)


async def walk(
    start: Point | Awaitable[Point], visit: Callable[[Point], Awaitable[Point | None]]
) -> Walk:
    """Walk from state to state; ``visit`` returns the next point, or None to stop.

    A failure of a policy, a search or the program ends the walk and becomes its ``error``.
    """
    path = Walk()
    try:
        point: Point | None = start if isinstance(start, Point) else await start
        while point is not None:
            path.points.append(point)
            point = await visit(point) if isinstance(point.need, NeedsCompletion) else None
    except FAILURES as error:
        path.error = error
    return path


class OpenWalks:
    """Counts walks that may still request a completion; a round acts when all wait for one.

    The count starts at 1.
    """

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self.n = 1
        self._on_end = on_end

    async def wait(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Wait for tasks; meanwhile their walks count as open and the caller's does not."""
        n_left = len(tasks)

        def end(_: object) -> None:
            nonlocal n_left
            n_left -= 1
            if n_left:
                self.n -= 1
                self._on_end()

        for task in tasks:
            task.add_done_callback(end)
        if tasks:
            self.n += len(tasks) - 1
            await asyncio.wait(tasks)

    async def gather(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Start coroutines, `wait` for them, and return their results in order."""
        tasks = [started(coroutine) for coroutine in work]
        await self.wait(tasks)
        return [await task for task in tasks]


@dataclass(frozen=True)
class RolloutRunner:
    """Runs one program with one actor."""

    runner: ProgramRunner
    actor: Actor

    async def run(
        self,
        tasks: Sequence[Task],
        *,
        concurrency: int = 128,
        on_done: Callable[[Rollout], None] = lambda rollout: None,
    ) -> list[Rollout]:
        """Return one rollout per task, in order."""
        rollouts: dict[int, Rollout] = {}

        async def run_task(number: int) -> None:
            rollout = await self.run_one(tasks[number])
            rollouts[number] = rollout
            on_done(rollout)

        await for_each(range(len(tasks)), run_task, min(concurrency, max(1, len(tasks))))
        return [rollouts[number] for number in range(len(tasks))]

    async def run_one(self, task: Task, index: int = 0) -> Rollout:
        """Return a task's rollout.

        ``index`` numbers repeated runs, which differ at temperature > 0.
        """
        calls: list[LMCall] = []

        async def visit(point: Point) -> Point:
            assert isinstance(point.need, NeedsCompletion)
            call, step = await self.actor.act(task, point.need, len(calls), index)
            calls.append(call)
            return await point.after(self.runner, step)

        path = await walk(begin(self.runner, task), visit)
        failure = path.failure
        prediction = None
        hops: tuple[Hop, ...] = ()
        if path.points:
            need = path.points[-1].need
            hops = _hops(need.searches)
            if failure is None and isinstance(need, Finished):
                if need.unparsed:
                    call = calls[-1]
                    failure = unparsed(self.runner.formatter, call.predictor, call.completion or "")
                else:
                    prediction = need.prediction
        return Rollout(task.id, hops, failure, prediction, index, tuple(calls))


def _hops(searches: Sequence[SearchCall]) -> tuple[Hop, ...]:
    rankings: list[Ranking] = []
    hops = []
    for search in searches:
        rankings += search.added
        hops.append(Hop(search.queries, merge(rankings), search.n_steps))
    return tuple(hops)
