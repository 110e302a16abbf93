import asyncio
from contextlib import closing
from dataclasses import replace

import pytest

from leret.core.errors import ProgramError, ReplayError, RetrievalError
from leret.core.types import Task
from leret.programs.runner import ProgramRunner
from leret.programs.search import search_tool
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.walk import Point
from tests.programs.conftest import Shelf, complete
from tests.programs.zoo import TwoPredictors


def test_a_program_that_does_not_end_is_told(walk):
    class Endless(TwoPredictors):
        def forward(self, question):
            while True:
                question = self.write(question=question, context=[]).query

    with pytest.raises(ProgramError, match="makes over 64 LM calls"):
        walk(Endless())


def test_a_search_tool_that_fails_is_an_outage_with_what_it_was_asked(walk):
    @search_tool
    def rows(query: str, k: int) -> list[dict]:
        raise TypeError(query)

    class Failing(TwoPredictors):
        def forward(self, question):
            return rows(question, k="three")

    with pytest.raises(RetrievalError, match=r"rows.*three.* failed: TypeError"):
        walk(Failing())


def test_without_a_retriever_of_the_run_a_search_asks_its_own(walk):
    program = TwoPredictors()
    with pytest.raises(ProgramError, match=r"Search\(retriever=...\)"):
        walk(program, shared=False)
    program.search.retriever = Shelf()
    _, end = walk(program, shared=False)
    assert [p.doc_id for p in end.searches[0].added[0]] == [f"{end.searches[0].queries[0]}-{i}" for i in range(2)]


@pytest.mark.parametrize("quick", [True, False])
def test_a_start_is_done_at_once_where_no_search_is_waited_for(quick):
    async def run(searches):
        runner = ProgramRunner.over(TwoPredictors(), None, searches)
        task, results = Task.question("q", "who is it?"), {}
        first = Point(task, await runner.advance(task, (), results), (), results)
        text = complete(first.need)
        if quick:  # the search is answered already
            await runner.advance(task, (runner.formatter.step(first.need, text),), results)
        reached = first.reach(runner, text)
        assert reached.end.done() is quick
        assert len((await reached.end).searches) == 1
        again = replace(first, steps=(reached.step,), reached={})
        with pytest.raises(ReplayError, match=r"write\.context"):
            await again.reach(runner, text).end

    with closing(SearchBatcher(Shelf())) as searches:
        asyncio.run(run(searches))
