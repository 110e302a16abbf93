"""Walking a program from step to step, with the retriever's answers fetched on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leret.core.types import Ranking, State, Task, digest
from leret.programs.prompts import Formatter
from leret.programs.replay import Finished, NeedsCompletion, NeedsSearch, Replay
from leret.retrieval.batching import SearchBatcher

MAX_STEPS = 64
"""LM calls after which a program is taken not to end."""

Known = dict[tuple[str, int], Ranking]
"""The retriever's answers on one path, by (query, k)."""


class ProgramRunner:
    """One program over one retriever.

    Args:
        replay: runs the program; synchronous, so one serves all questions of an event loop.
        formatter: of the same program.
        front: the retriever.
    """

    def __init__(self, replay: Replay, formatter: Formatter, front: SearchBatcher) -> None:
        self.replay = replay
        self.formatter = formatter
        self.front = front

    async def advance(
        self, question: Task, outputs: Sequence[Mapping[str, Any]], known: Known
    ) -> NeedsCompletion | Finished:
        """Run up to the next step without a completion.

        Args:
            question: whose text the program gets.
            outputs: of the steps before.
            known: what this path has retrieved; what it retrieves now is added.

        Raises:
            ProgramError: the program raised.
            RetrievalError: the retriever could not answer.
        """
        while True:
            need = self.replay.run(question.text, outputs, lambda query, k: known.get((query, k)))
            if not isinstance(need, NeedsSearch):
                return need
            [known[need.query, need.k]] = await self.front.search([need.query], need.k)

    def state(self, question: Task, need: NeedsCompletion, step: int, parent: str | None = None) -> State:
        """The state that the program stands at."""
        return State(
            id=digest(question.id, need.predictor, need.inputs),
            question_id=question.id,
            step=step,
            predictor=need.predictor,
            inputs=need.inputs,
            messages=self.formatter.messages(need.predictor, need.inputs),
            parent=parent,
        )
