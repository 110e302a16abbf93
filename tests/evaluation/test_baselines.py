"""Systems without an LM go through the program itself."""

from pathlib import Path

import dspy
import pytest

from leret.core.errors import ConfigError
from leret.core.types import Document, Passage, Task
from leret.evaluation.baselines import answer_fields, oracle_titles, raw_question, run_scripted
from leret.programs import Found, Search
from leret.programs.load import load_program
from leret.programs.replay import Replay

ROOT = Path(__file__).parents[2]
CORPUS = {i: Document(i, title, "text") for i, title in [("d1", "Ann"), ("d2", "Bob"), ("d3", "Cid"), ("d4", "")]}


class Words:
    """Ranks the documents whose title stands in the query, longest first; remembers its batches."""

    digest = "words"

    def __init__(self):
        self.batches = []

    def search(self, queries, k):
        self.batches.append((tuple(queries), k))
        return [
            tuple(
                Passage(d.doc_id, d.title, d.text, float(10 - i))
                for i, d in enumerate(CORPUS.values())
                if d.title and d.title in query
            )[:k]
            for query in queries
        ]


def multihop(hops=2, **more):
    return Replay(load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": hops}, k=1, **more))


QUESTIONS = [
    Task.question("q1", "Who knew Ann and Bob?", gold=("d1", "d2")),
    Task.question("q2", "Bob?", gold=("d2", "d3")),
]


def found(trace):
    return [[p.doc_id for p in hop.ranking] for hop in trace.hops]


def test_the_raw_question_is_asked_at_every_hop():
    traces = run_scripted(multihop(), Words(), QUESTIONS, raw_question)
    assert [hop.query for hop in traces[0].hops] == ["Who knew Ann and Bob?"] * 2
    assert found(traces[0]) == [["d1"], ["d1"]]


def test_exclude_seen_is_the_programs():
    traces = run_scripted(multihop(exclude_seen=True), Words(), QUESTIONS, raw_question)
    assert found(traces[0]) == [["d1"], ["d1", "d2"]]


def test_questions_share_their_searches():
    retriever = Words()
    run_scripted(multihop(), retriever, [*QUESTIONS, QUESTIONS[0]], raw_question)
    assert retriever.batches == [(("Who knew Ann and Bob?", "Bob?"), 1)]


def test_the_oracle_asks_for_one_title_a_hop():
    traces = run_scripted(multihop(), Words(), QUESTIONS, oracle_titles(CORPUS, {"q1": 2, "q2": 2}))
    assert [[hop.query for hop in t.hops] for t in traces] == [["Ann", "Bob"], ["Bob", "Cid"]]
    assert found(traces[1]) == [["d2"], ["d2", "d3"]]


def test_the_last_hop_of_the_oracle_asks_for_all_that_remain():
    question = Task.question("q", "?", gold=("d1", "d2", "d3"))
    script = oracle_titles(CORPUS, {"q": 2})
    assert [script(question, 0), script(question, 1)] == [("Ann",), ["Bob", "Cid"]]


def test_an_oracle_with_hops_to_spare_asks_for_its_last_title_again():
    script = oracle_titles(CORPUS, {"q": 3})
    assert [list(script(Task.question("q", "?", gold=("d1",)), step)) for step in range(3)] == [["Ann"]] * 3


def test_a_document_without_a_title_is_asked_for_by_its_first_words():
    assert list(oracle_titles(CORPUS, {"q": 1})(Task.question("q", "?", gold=("d4",)), 0)) == ["text"]


def test_a_chain_of_thought_says_it_in_every_text_field():
    replay = Replay(load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 1, "reason": True}, k=1))
    assert found(run_scripted(replay, Words(), QUESTIONS, raw_question)[0]) == [["d1"]]


def test_a_list_of_queries_gets_a_list():
    signature = dspy.Signature("question -> queries: list[str], note: str")
    assert answer_fields(signature, ["a", "b"]) == {"queries": ["a", "b"], "note": "a b"}


def test_other_outputs_are_refused():
    with pytest.raises(ConfigError, match=r"leave them out of `systems`"):
        answer_fields(dspy.Signature("question -> ok: bool"), ["a"])


class Endless(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("question -> query")
        self.search = Search(k=1)

    def forward(self, question):
        found = Found()
        while True:
            found = self.search(self.ask(question=question).query, found)


def test_a_program_that_does_not_end_is_refused():
    with pytest.raises(ConfigError, match="does not end on a rule"):
        run_scripted(Replay(Endless()), Words(), QUESTIONS[:1], raw_question)
