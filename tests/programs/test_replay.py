"""A program is replayed as a function of its completions."""

from pathlib import Path

import dspy
import pytest

from leret.core.errors import ProgramError
from leret.core.types import Passage
from leret.programs import Found, Search
from leret.programs.load import load_program
from leret.programs.replay import Finished, NeedsCompletion, NeedsSearch, Replay

ROOT = Path(__file__).parents[2]
SHELF = {
    "a": (Passage("d1", "T1", "one", 2.0), Passage("d2", "T2", "two", 1.0)),
    "b": (Passage("d2", "T2", "two", 9.0), Passage("d3", "T3", "three", 1.5), Passage("d4", "T4", "four", 0.5)),
}


def known(query, k):
    return SHELF[query][:k]


def unknown(query, k):
    return None


@pytest.fixture
def replay():
    return Replay(load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 2}, k=2))


def test_stops_at_the_first_step(replay):
    need = replay.run("who?", [], unknown)
    assert need == NeedsCompletion("write_query", {"question": "who?", "context": []}, ())


def test_stops_at_an_unknown_search(replay):
    assert replay.run("who?", [{"query": "a"}], unknown) == NeedsSearch("a", 2)


def test_the_next_step_sees_the_union_by_score(replay):
    need = replay.run("who?", [{"query": "a"}], known)
    assert need.inputs["context"] == ["T1 | one", "T2 | two"]
    done = replay.run("who?", [{"query": "a"}, {"query": "b"}], known)
    assert isinstance(done, Finished)
    assert [p.doc_id for p in done.ranking] == ["d2", "d1", "d3"]
    assert done.prediction.doc_ids == ["d2", "d1", "d3"]


def test_exclude_seen_brings_new_passages():
    program = load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 2}, k=2, exclude_seen=True)
    done = Replay(program).run("who?", [{"query": "a"}, {"query": "b"}], known)
    assert [p.doc_id for p in done.ranking] == ["d1", "d3", "d2", "d4"]


def test_runs_do_not_leak_into_each_other(replay):
    first = replay.run("who?", [{"query": "a"}], known)
    replay.run("else?", [{"query": "b"}], known)
    assert replay.run("who?", [{"query": "a"}], known) == first


def test_a_program_of_another_shape_replays_as_well():
    program = load_program(ROOT / "tests/programs/threehop.py", "ThreeHop", {}, k=3)
    replay = Replay(program)
    need = replay.run("a claim", [{"lookup": "a"}], known)
    assert (need.predictor, need.inputs) == ("then", {"claim": "a claim", "notes": ["T1", "T2"]})


class Catching(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("question -> query")
        self.search = Search(k=1)

    def forward(self, question):
        try:
            found = self.search(self.ask(question=question).query)
        except Exception:
            found = Found()
        return dspy.Prediction(doc_ids=found.doc_ids)


def test_a_program_that_catches_everything_still_stops():
    assert isinstance(Replay(Catching()).run("q", [], unknown), NeedsCompletion)


def test_a_crash_names_the_program_and_the_question():
    class Broken(Catching):
        def forward(self, question):
            raise KeyError("x")

    with pytest.raises(ProgramError, match="Broken failed on 'who' after 0 completions: KeyError"):
        Replay(Broken()).run("who", [], unknown)


def test_a_program_without_a_predictor_is_refused():
    class Empty(dspy.Module):
        def forward(self, question):
            return None

    with pytest.raises(ProgramError, match="no predictor"):
        Replay(Empty())


def test_a_forward_of_two_unknown_arguments_is_refused():
    class Two(Catching):
        def forward(self, left, right):
            return None

    with pytest.raises(ProgramError, match="takes left, right"):
        Replay(Two())
