"""Run a program step by step, and answer its searches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import dspy

from leret.core.errors import LeretError, ProgramError, RetrievalError, raised
from leret.core.types import State, Task, digest
from leret.policies.tool_calls import ToolReader, read_calls
from leret.programs.needs import Finished, NeedsCompletion, NeedsSearch, Step
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay, Retrieve, SearchResults
from leret.retrieval.batching import SearchBatcher


@dataclass(frozen=True)
class ProgramRunner:
    """Runs one program over one retriever.

    The caller provides completions (from a policy, a rule or the store).

    ``searches`` answers all searches; it is None if every `leret.Search` has a retriever.
    """

    replay: Replay
    formatter: Formatter
    searches: SearchBatcher | None
    _batchers: dict[int, SearchBatcher] = field(default_factory=dict)

    @classmethod
    def over(
        cls,
        program: dspy.Module,
        adapter: dspy.Adapter | None,
        searches: SearchBatcher | None,
        rm: Any = None,
        read: ToolReader = read_calls,
    ) -> ProgramRunner:
        replay = Replay(program, adapter, rm, read)
        return cls(replay, Formatter(replay), searches)

    @cached_property
    def retrieve(self) -> Retrieve | None:
        if self.searches is None:
            return None
        return self.searches.search_now

    async def advance(
        self, task: Task, steps: Sequence[Step], results: SearchResults, check: bool = False
    ) -> NeedsCompletion | Finished:
        """Run to the first step that has no completion yet, or to the end.

        ``check`` fails if a second run differs.
        """
        need = self.replay.run(task, steps, results, self.retrieve, check)
        if isinstance(need, NeedsSearch):
            return await self.answer_search(need, task, steps, results, check)
        return need

    async def answer_search(
        self,
        need: NeedsSearch,
        task: Task,
        steps: Sequence[Step],
        results: SearchResults,
        check: bool,
    ) -> NeedsCompletion | Finished:
        """Answer a search, then continue with `advance`."""
        results[need.key] = await self._search(need)
        return await self.advance(task, steps, results, check)

    async def deep_ids(
        self, need: NeedsCompletion | Finished, n_steps: int, depth: int
    ) -> tuple[tuple[str, ...], ...]:
        """Return the ids of the top ``depth`` documents for each query after ``n_steps`` completions."""
        if self.searches is None:
            raise ProgramError(
                "a reward with a depth needs the run's retriever; remove Search(retriever=...)"
            )
        queries: list[str] = []
        for search in need.searches:
            if search.n_steps == n_steps:
                queries += search.queries
        quick = [self.searches.search_now(query, depth) for query in queries]
        rankings = [ranking for ranking in quick if ranking is not None]
        if len(rankings) < len(queries):
            rankings = await self.searches.search(queries, depth)
        ids = []
        for ranking in rankings:
            ids.append(tuple(passage.doc_id for passage in ranking))
        return tuple(ids)

    def state(
        self, task: Task, need: NeedsCompletion, step: int, parent: str | None = None
    ) -> State:
        """Return the state at a step.

        Its id is a digest of the zero-shot messages, so equal messages share a state.
        """
        messages = self.formatter.messages(need)
        id = digest(task.id, need.predictor, messages)
        return State(id, task.id, step, need.predictor, need.inputs, messages, parent)

    async def _search(self, need: NeedsSearch) -> object:
        if need.ask is not None:
            try:
                return await asyncio.to_thread(need.ask)
            except LeretError:
                raise
            except (Exception, SystemExit) as error:
                raise RetrievalError(
                    f"{need.key[0]}{need.key[1]} failed: {raised(error)}"
                ) from error
        searches = self.searches
        if searches is None:
            if need.retriever is None:
                raise ProgramError(
                    "a leret.Search has no retriever: pass one as Search(retriever=...)"
                )
            searches = self._batchers.setdefault(id(need.retriever), SearchBatcher(need.retriever))
        [ranking] = await searches.search([need.query], need.k)
        return ranking
