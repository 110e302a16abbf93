import asyncio
from contextlib import closing

import pytest

from benchmarks.cost.walk import walk_of_a_sample
from leret.core.errors import ProgramError, RetrievalError
from leret.core.types import Task
from leret.programs.runner import ProgramRunner
from leret.retrieval import batching
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.walk import begin, walk
from tests.sampling.fakes import FakeRetriever


def test_a_new_sample_passes_few_files_and_calls(monkeypatch):
    monkeypatch.setattr(batching, "_QUICK_S", batching._QUICK_S)  # restores what the count sets
    # What another test left behind, such as an object that is collected now, may add a call to one of them.
    calls = min((walk_of_a_sample() for _ in range(2)), key=len)
    assert {"rollouts/states.py", "rollouts/walk.py", "sampling/store/store.py"} <= {file for file, _ in calls}
    files = {file for file, _ in calls}
    assert len(files) <= 18, sorted(files)
    assert len(calls) <= 50


@pytest.fixture
def go(replay, formatter):
    def go(error=None, stop=9, broken=()):
        async def visit(point):
            if len(point.steps) == 1 and error:
                raise error
            return None if len(point.steps) == stop else await point.after(runner, point.reach(runner, "alpha"))

        with closing(SearchBatcher(FakeRetriever(broken=broken))) as searches:
            runner = ProgramRunner(replay, formatter, searches)
            return asyncio.run(walk(begin(runner, Task.question("q", "what follows alpha?")), visit))

    return go


def test_a_walk_has_its_points_to_the_end_or_to_where_a_visit_stops(go):
    assert [len(point.steps) for point in go().points] == [0, 1, 2]
    assert go().end.need.prediction.doc_ids[0] == "alpha"
    assert [len(point.steps) for point in go(stop=1).points] == [0, 1]
    with pytest.raises(ZeroDivisionError):  # no failure of the walk
        go(error=ZeroDivisionError())


@pytest.mark.parametrize(
    ("keys", "kind", "n_points"),
    [({"error": ProgramError("crash")}, "program", 2), ({"broken": ["alpha"]}, "retrieval", 1)],
)
def test_a_failure_ends_the_walk_and_is_kept_with_the_points_before(go, keys, kind, n_points):
    path = go(**keys)
    assert (path.failure.kind, len(path.points)) == (kind, n_points)
    with pytest.raises((ProgramError, RetrievalError)):
        _ = path.end
