"""Running a program once on each of many tasks: one completion a step, no branching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leret.core.aio import for_each
from leret.core.types import Hop, LMCall, Ranking, Rollout, Task, merge
from leret.programs.needs import Finished, NeedsCompletion
from leret.programs.runner import ProgramRunner
from leret.programs.search import SearchCall
from leret.rollouts.actors import Actor
from leret.rollouts.failures import unparsed
from leret.rollouts.walk import Point, begin, walk


@dataclass(frozen=True)
class RolloutRunner:
    """Runs one program with one actor."""

    runner: ProgramRunner
    actor: Actor

    async def run(
        self,
        tasks: Sequence[Task],
        *,
        index: int = 0,
        concurrency: int = 128,
        on_done: Callable[[Rollout], None] = lambda rollout: None,
    ) -> list[Rollout]:
        """Return one rollout a task, in their order; ``index`` numbers repeated runs at a temperature above 0."""
        rollouts: dict[int, Rollout] = {}

        async def one(place: int) -> None:
            rollouts[place] = await self.run_one(tasks[place], index)
            on_done(rollouts[place])

        await for_each(range(len(tasks)), one, min(concurrency, max(1, len(tasks))))
        return [rollouts[place] for place in range(len(tasks))]

    async def run_one(self, task: Task, index: int = 0) -> Rollout:
        calls: list[LMCall] = []

        async def visit(point: Point) -> Point:
            assert isinstance(point.need, NeedsCompletion)
            call, step = await self.actor.act(task, point.need, len(calls), index)
            calls.append(call)
            return await point.after(self.runner, step)

        path = await walk(begin(self.runner, task), visit)
        failure, prediction = path.failure, None
        last = path.points[-1].need if path.points else None
        if failure is None and isinstance(last, Finished):
            if last.unparsed:
                failure = unparsed(self.runner.formatter, calls[-1].predictor, calls[-1].completion or "")
            else:
                prediction = last.prediction
        hops = _hops(last.searches) if last else ()
        return Rollout(task.id, hops, failure is None, failure, prediction, index, tuple(calls))


def _hops(searches: Sequence[SearchCall]) -> tuple[Hop, ...]:
    rankings: list[Ranking] = []
    hops = []
    for search in searches:
        rankings += search.added
        hops.append(Hop(search.queries, merge(rankings), search.n_steps))
    return tuple(hops)
