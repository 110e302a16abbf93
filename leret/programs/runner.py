"""Running a program from step to step; its searches are answered on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dspy

from leret.core.aio import started
from leret.core.errors import LeretError, ProgramError, ReplayError, RetrievalError, raised
from leret.core.types import State, Task, digest
from leret.programs.needs import REPEATABLE, Finished, NeedsCompletion, NeedsSearch, Step, difference, place
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay, SearchResults
from leret.retrieval.batching import SearchBatcher

MAX_STEPS = 64
"""LM calls after which a program is taken not to end."""

_REPEATS = 4
"""Runs that a path must come to the same place in, where that is checked."""


@dataclass(frozen=True)
class ProgramRunner:
    """One program over one retriever. Whoever uses it answers the completions: a policy, a rule, or the store.

    A replay runs one path at a time, so one serves all tasks of an event loop; the formatter is of the same program.

    Attributes:
        searches: the retriever of all searches; None where every `leret.Search` has its own.
    """

    replay: Replay
    formatter: Formatter
    searches: SearchBatcher | None
    _own: dict[int, SearchBatcher] = field(default_factory=dict)
    _waits: set[object] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Whether no task waits for a search, or for a call in a thread."""
        return not self._waits

    async def in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        """What a call that may block gives."""
        with self.waiting():
            return await asyncio.to_thread(call, *args)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what a task waits for, so that nobody takes it for idle."""
        mark = object()
        self._waits.add(mark)
        try:
            yield
        finally:
            self._waits.discard(mark)

    @classmethod
    def over(
        cls, program: dspy.Module, adapter: dspy.Adapter | None, searches: SearchBatcher | None, rm: Any = None
    ) -> ProgramRunner:
        """Of a program, with its own replay (which see) and formatter."""
        replay = Replay(program, adapter, rm)
        return cls(replay, Formatter(replay), searches)

    async def advance(
        self, task: Task, steps: Sequence[Step], results: SearchResults, check: bool = False
    ) -> NeedsCompletion | Finished:
        """Run up to the next step without a completion, or to the end; raises what `Replay.run` and a search do.

        With ``check`` the path is run again, several times, and a program that comes to another place is refused.
        """
        while isinstance(need := self._run(task, steps, results, check), NeedsSearch):
            results[need.key] = await self._search(need)
        return need

    def start(
        self, task: Task, steps: Sequence[Step], results: SearchResults, check: bool = False
    ) -> asyncio.Future[NeedsCompletion | Finished]:
        """`advance`, done at once where no search is waited for, and else in a task."""
        future = asyncio.get_running_loop().create_future()
        try:
            need = self._run(task, steps, results, check)
        except Exception as error:
            future.set_exception(error)
            future.exception()  # read, so that it leaves no warning where another one's error ends the session
            return future
        if isinstance(need, NeedsSearch):
            return started(self._after(need, task, steps, results, check))
        future.set_result(need)
        return future

    async def _after(
        self, need: NeedsSearch, task: Task, steps: Sequence[Step], results: SearchResults, check: bool
    ) -> NeedsCompletion | Finished:
        results[need.key] = await self._search(need)
        return await self.advance(task, steps, results, check)

    def _run(
        self, task: Task, steps: Sequence[Step], results: SearchResults, check: bool
    ) -> NeedsCompletion | NeedsSearch | Finished:
        retrieve = None if self.searches is None else self.searches.search_now
        need = self.replay.run(task, steps, results, retrieve)
        if isinstance(need, NeedsSearch):
            return need
        if len(steps) >= MAX_STEPS and isinstance(need, NeedsCompletion):
            raise ProgramError(f"task {task.id}: the program asks for more than {MAX_STEPS} completions")
        for _ in range(_REPEATS if check else 0):
            again = self.replay.run(task, steps, dict(results), retrieve)
            if place(again) != place(need):
                raise ReplayError(
                    f"{type(self.replay.program).__name__} is not deterministic given its completions: after the "
                    f"same {len(steps)}, {difference(need, again)}. Nothing can be learnt from alternatives at a "
                    f"state that does not come back: {REPEATABLE}"
                )
        return need

    def state(self, task: Task, need: NeedsCompletion, step: int, parent: str | None = None) -> State:
        """The state that the program stands at. Its id names what the zero-shot prompt sends, so a group is pure."""
        messages = self.formatter.messages(need)
        return State(
            id=digest(task.id, need.predictor, messages),
            task_id=task.id,
            step=step,
            predictor=need.predictor,
            inputs=need.inputs,
            messages=messages,
            parent=parent,
        )

    async def _search(self, need: NeedsSearch) -> object:
        if need.ask is not None:
            try:
                return await self.in_thread(need.ask)
            except LeretError:
                raise
            except (Exception, SystemExit) as error:
                raise RetrievalError(f"{need.key[0]}{need.key[1]} failed: {raised(error)}") from error
        searches = self.searches
        if searches is None:
            if need.retriever is None:
                raise ProgramError("a leret.Search has no retriever: pass one as Search(retriever=...)")
            searches = self._own.setdefault(id(need.retriever), SearchBatcher(need.retriever))
        with self.waiting():
            [ranking] = await searches.search([need.query], need.k)
        return ranking
