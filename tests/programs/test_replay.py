"""A program is replayed as a function of its completions."""

from pathlib import Path

import dspy
import pytest

from leret.core.errors import ProgramError, RetrievalError
from leret.core.types import Passage, Task
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


def run(replay, question, outputs, retrieve=None):
    return replay.run(Task.question("q", question), outputs, {}, retrieve)


@pytest.fixture
def replay():
    return Replay(load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 2}, k=2))


def test_it_stops_at_a_step_and_at_a_search_that_are_not_known(replay):
    assert run(replay, "who?", []) == NeedsCompletion("write_query", {"question": "who?", "context": []}, ())
    assert run(replay, "who?", [{"query": "a"}]) == NeedsSearch("a", 2)


def test_the_next_step_sees_the_union_by_score_and_nothing_of_other_runs(replay):
    need = run(replay, "who?", [{"query": "a"}], known)
    assert need.inputs["context"] == ["T1 | one", "T2 | two"]
    done = run(replay, "who?", [{"query": "a"}, {"query": "b"}], known)
    assert isinstance(done, Finished)
    assert [p.doc_id for p in done.ranking] == done.prediction.doc_ids == ["d2", "d1", "d3"]
    assert run(replay, "who?", [{"query": "a"}], known) == need


class Catching(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = self.again = dspy.Predict("question -> query")
        self.search = Search(k=1)

    def forward(self, question):
        try:
            found = self.search(self.ask(question=question).query)
        except Exception:
            found = Found()
        return dspy.Prediction(doc_ids=found.doc_ids)


def variant(forward):
    """The program with another ``forward``."""
    return type("Variant", (Catching,), {"forward": forward})()


def test_a_program_that_catches_everything_still_stops_and_an_outage_passes_it():
    def away(query, k):
        raise RetrievalError("away")

    program = Catching()
    assert isinstance(run(Replay(program), "q", []), NeedsCompletion)
    with pytest.raises(RetrievalError, match="away"):
        run(Replay(program), "q", [{"query": "x"}], away)
    # classes of the program stay as they are
    assert (type(program), type(program.search), "forward" in vars(program)) == (Catching, Search, False)


def test_a_crash_names_the_program_and_the_question():
    with pytest.raises(ProgramError, match="Variant failed on 'who' after 0 completions: KeyError"):
        run(Replay(variant(lambda self, question: {}["x"])), "who", [])


def test_inputs_are_bound_by_name_and_a_predictor_under_two_names_is_replayed_under_both():
    two = variant(lambda self, left, right: self.ask(question=f"{left} {right}"))
    assert Replay(two).run(Task("t", {"left": "a", "right": "b"}), [], {}).inputs == {"question": "a b"}
    twice = variant(lambda self, question: self.again(question=self.ask(question=question).query))
    assert run(Replay(twice), "q", [{"query": "x"}]).inputs == {"question": "x"}


@pytest.mark.parametrize(
    ("base", "forward", "message"),
    [(dspy.Module, lambda self, question: None, "no predictor"), (Catching, lambda self, depth=1: None, "takes depth")],
)
def test_a_program_without_a_predictor_or_an_input_is_refused(base, forward, message):
    with pytest.raises(ProgramError, match=message):
        Replay(type("Program", (base,), {"forward": forward})())
