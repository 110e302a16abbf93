from copy import deepcopy
from types import SimpleNamespace

import dspy
import pytest
from dspy.utils import DummyLM

from leret.core.errors import ProgramError
from leret.core.types import Passage
from leret.programs.load import load_program
from leret.programs.search import Found, Search, ranking_of
from tests.sampling.fakes import ROOT

ONE, TWO, THREE = (Passage(f"d{i}", f"T{i}" if i < 3 else "", f"text {i}", float(4 - i)) for i in (1, 2, 3))


def test_what_is_found_is_told_in_the_order_of_the_scores():
    found = Found(((TWO, THREE), (ONE, TWO)))
    assert (found.doc_ids, found.scores) == (["d1", "d2", "d3"], [3.0, 2.0, 1.0])
    assert (found.titles, found.passages) == (["T1", "T2", ""], ["T1 | text 1", "T2 | text 2", "text 3"])


def test_several_queries_may_exclude_what_was_seen_and_the_retriever_is_dspys():
    shelf = SimpleNamespace(digest="shelf", search=lambda queries, k: [(ONE, TWO, THREE)[:k] for _ in queries])
    with dspy.context(rm=shelf):
        assert Search(k=1)(["a", "b"]).searches == ((ONE,), (ONE,))
        assert Search(k=1, exclude_seen=True)(["a", "b"], Found(((TWO,),))).searches == ((TWO,), (ONE,), (THREE,))
        assert Search()([]).searches == ()
        assert Search(one_document=True)("a").searches == ((ONE,),)
    with pytest.raises(ProgramError, match=r"dspy\.configure\(rm=\.\.\.\)"):
        Search()("a")


def test_one_document_is_all_passages_with_the_best_ones_title():
    part, other = Passage("d1#1", "T1", "more", 1.0), Passage("d4", "", "text 4", 1.0)
    for ranking, read in (((ONE, TWO, part), (ONE, part)), ((THREE, TWO, other), (THREE,))):
        shelf = SimpleNamespace(digest="shelf", search=lambda queries, k, ranking=ranking: [ranking])
        search = Search(k=3, one_document=True, retriever=shelf)
        assert search("a").searches == deepcopy(search)("a").searches == (read,)


def test_the_agent_searches_then_reads_a_whole_document_then_answers():
    parts = tuple(Passage(f"d#{i}", "Tower", f"part {i} {'x ' * 80}", 1.0 + i % 3) for i in (2, 10, 1))
    shelf = SimpleNamespace(digest="shelf", search=lambda queries, k: [(*parts, THREE)[:k]])
    tools = [("search", "tower"), ("look_up", "Tower"), ("finish", "")]
    steps = [
        {"next_thought": "", "next_tool_name": name, "next_tool_args": {"query": query} if query else {}}
        for name, query in tools
    ]
    agent = load_program(ROOT / "pipelines/agent.py", "Agent", {"words": 5})
    with dspy.context(lm=DummyLM([*steps, {"reasoning": "", "answer": "ten"}]), rm=shelf):
        done = agent(question="how tall")
    searched, read = (done.trajectory[f"observation_{i}"] for i in (0, 1))
    assert (searched[0], len(searched)) == ("Tower | part 2 x", 3)
    assert [text.split(" x ")[0] for text in read] == ["Tower | part 1", "Tower | part 2", "Tower | part 10"]
    assert (done.answer, len(read[0].split())) == ("ten", 84)


def test_rows_that_are_plain_strings_have_no_title_and_need_ids():
    assert ranking_of(["a film"], ids=lambda row: "d7") == (Passage("d7", "", "a film", 1.0),)
    with pytest.raises(ProgramError, match=r"search_tool\(fn, ids=\.\.\.\)"):
        ranking_of([object()])
