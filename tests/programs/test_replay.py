import logging
import sys
from contextlib import suppress

import dspy
import pytest

import leret
from leret.core.errors import ProgramError, ReplayError, RetrievalError
from leret.core.types import Passage, Task
from leret.programs.load import load_program
from leret.programs.needs import Finished, NeedsCompletion, NeedsSearch, Step
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.programs.search import Found, Search
from tests.sampling.fakes import ROOT

SHELF = {
    "a": (Passage("d1", "T1", "one", 2.0), Passage("d2", "T2", "two", 1.0)),
    "b": (Passage("d2", "T2", "two", 9.0), Passage("d3", "T3", "three", 1.5), Passage("d4", "T4", "four", 0.5)),
}


def known(query, k):
    return SHELF[query][:k]


def run(replay, question, texts, retrieve=None):
    formatter, task, steps, results = Formatter(replay), Task.question("q", question), [], {}
    for text in texts:
        need = replay.run(task, steps, results, retrieve)
        assert isinstance(need, NeedsCompletion)
        steps.append(formatter.step(need, formatter.completion(need.predictor, {"query": text})))
    return replay.run(task, steps, results, retrieve)


def test_it_stops_at_what_is_not_known_and_goes_on_with_the_union_by_score():
    replay = Replay(load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 2}, k=2))
    need = run(replay, "who?", [])
    assert (need.predictor, need.inputs, need.searches) == ("write_query", {"question": "who?", "context": []}, ())
    assert run(replay, "who?", ["a"]) == NeedsSearch(("a", 2), "a", 2)
    need = run(replay, "who?", ["a"], known)
    assert need.inputs["context"] == ["T1 | one", "T2 | two"]
    done = run(replay, "who?", ["a", "b"], known)
    assert isinstance(done, Finished)
    assert [p.doc_id for p in done.ranking] == done.prediction.doc_ids == ["d2", "d1", "d3"]
    assert run(replay, "who?", ["a"], known).key == need.key, "nothing of another run"


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
    return type("Variant", (Catching,), {"forward": forward})()


def test_a_program_that_catches_everything_still_stops_and_an_outage_passes_it():
    def away(query, k):
        raise RetrievalError("away")

    def bare(self, question):
        for _ in range(3):
            with suppress(BaseException):
                self.search(self.ask(question=question).query)

    for program in (Catching(), variant(bare)):
        assert isinstance(run(Replay(program), "q", []), NeedsCompletion)
        with pytest.raises(RetrievalError, match="away"):
            run(Replay(program), "q", ["x"], away)
        assert "forward" not in vars(program)


def test_a_replayed_program_prints_and_logs_nothing(capsys):
    def talks(self, question):
        print("hello")
        logging.getLogger("dspy").warning("hello")
        return self.ask(question=question, unknown=1)

    run(Replay(variant(talks)), "q", ["x"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("forward", "says"),
    [(lambda self, question: {}["x"], "KeyError: 'x'"), (lambda self, question: sys.exit(3), "SystemExit: 3")],
    ids=["error", "exit"],
)
def test_a_crash_names_the_program_its_line_and_the_question(forward, says):
    place = rf"\(.*test_replay\.py:{forward.__code__.co_firstlineno}\)"
    with pytest.raises(ProgramError, match=f"Variant failed on 'who' after 0 completions: {says} {place}"):
        run(Replay(variant(forward)), "who", [])


def test_inputs_are_bound_by_name_and_a_predictor_under_two_names_is_replayed_under_both():
    two = variant(lambda self, left, right: self.ask(question=f"{left} {right}"))
    assert Replay(two).run(Task("t", {"left": "a", "right": "b"}), [], {}).inputs == {"question": "a b"}
    twice = variant(lambda self, question: self.again(question=self.ask(question=question).query))
    assert run(Replay(twice), "q", ["x"]).inputs == {"question": "x"}


@pytest.mark.parametrize(
    ("base", "forward", "message"),
    [(dspy.Module, lambda self, question: None, "no predictor"), (Catching, lambda self, depth=1: None, "no required")],
    ids=["predictor", "input"],
)
def test_a_program_without_a_predictor_or_an_input_is_refused(base, forward, message):
    with pytest.raises(ProgramError, match=message):
        Replay(type("Program", (base,), {"forward": forward})())


def test_outputs_are_found_by_what_is_asked_and_an_unused_one_is_told():
    def forward(self, question):
        a, b = (self.ask(question=text).query for text in self.order)
        return dspy.Prediction(query=f"{a} {b}")

    program = variant(forward)
    program.order = ("x", "y")
    replay, task = Replay(program), Task.question("q", "?")
    first = replay.run(task, [], {})
    formatter = Formatter(replay)
    one = formatter.step(first, formatter.completion("ask", {"query": "1"}))
    two = Step(replay.run(task, [one], {}).call, [{"query": "2"}])
    assert replay.run(task, [one, two], {}).prediction.query == "1 2"
    program.order = ("y", "x")
    assert replay.run(task, [one, two], {}).prediction.query == "2 1"
    program.order = ("x", "z")
    with pytest.raises(ReplayError, match=r'ask.question was "y" in one run, and "z" in another'):
        replay.run(task, [one, two], {})


def test_agents_steps_and_picks_with_a_stop_decide_when_a_program_stops():
    program = variant(lambda self, question: None)
    program.picks = [leret.Pick(stop=True), leret.Pick()]
    program.agents = {"first": dspy.ReAct("plan -> answer", tools=[dspy.Tool(lambda query: query, name="find")])}
    replay = Replay(program)
    assert replay.stops == {"agents['first'].react", "picks[0]"}
    assert set(replay.names) > replay.stops
    assert Replay(program.agents["first"]).stops == {"react"}
