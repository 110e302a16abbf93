"""Running a program from step to step; its searches are answered on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leret.core.errors import ProgramError
from leret.core.types import State, Task, digest
from leret.programs.prompts import Formatter
from leret.programs.replay import Finished, NeedsCompletion, NeedsSearch, Replay, SearchResults
from leret.retrieval.batching import SearchBatcher

MAX_STEPS = 64
"""LM calls after which a program is taken not to end."""


@dataclass(frozen=True)
class ProgramRunner:
    """One program over one retriever. Whoever uses it answers the completions: a policy, a rule, or the store.

    A replay is synchronous, so one serves all tasks of an event loop; the formatter is of the same program.
    """

    replay: Replay
    formatter: Formatter
    searches: SearchBatcher

    async def advance(
        self, task: Task, outputs: Sequence[Mapping[str, Any]], results: SearchResults
    ) -> NeedsCompletion | Finished:
        """Run up to the next step without a completion, or to the end; raises what `Replay.run` and a search do."""
        while True:
            need = self.replay.run(task, outputs, results, self.searches.search_now)
            if isinstance(need, NeedsSearch):
                [results[need.query, need.k]] = await self.searches.search([need.query], need.k)
                continue
            if len(outputs) >= MAX_STEPS and isinstance(need, NeedsCompletion):
                raise ProgramError(f"task {task.id}: the program asks for more than {MAX_STEPS} completions")
            return need

    def state(self, task: Task, need: NeedsCompletion, step: int, parent: str | None = None) -> State:
        """The state that the program stands at."""
        return State(
            id=digest(task.id, need.predictor, need.inputs),
            question_id=task.id,
            step=step,
            predictor=need.predictor,
            inputs=need.inputs,
            messages=self.formatter.messages(need.predictor, need.inputs),
            parent=parent,
        )
