"""Systems without an LM go through the program itself."""

import asyncio
from pathlib import Path

import dspy
import pytest

from leret.core.errors import ConfigError
from leret.core.types import Document, Passage, Task
from leret.evaluation.baselines import ScriptedPolicy, answer_fields, oracle_titles, raw_question
from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.sampling.rollouts.rollout import RolloutRunner

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


def multihop(hops=2, reason=False, **more):
    return load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": hops, "reason": reason}, k=1, **more)


def run_scripted(program, retriever, tasks, script):
    async def main():
        searches, formatter = SearchBatcher(retriever), Formatter(program, CompactAdapter())
        runner = ProgramRunner(Replay(program), formatter, searches)
        try:
            return await RolloutRunner(runner, ScriptedPolicy(formatter, script)).run(tasks)
        finally:
            searches.close()

    return asyncio.run(main())


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
    assert found(run_scripted(multihop(1, reason=True), Words(), QUESTIONS, raw_question)[0]) == [["d1"]]


def test_a_list_of_queries_gets_a_list():
    signature = dspy.Signature("question -> queries: list[str], note: str")
    assert answer_fields(signature, ["a", "b"]) == {"queries": ["a", "b"], "note": "a b"}


def test_other_outputs_are_refused():
    with pytest.raises(ConfigError, match=r"leave them out of `systems`"):
        answer_fields(dspy.Signature("question -> ok: bool"), ["a"])
