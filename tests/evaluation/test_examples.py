"""The questions that were gained and lost most on."""

from leret.core.types import Document, Task
from leret.evaluation.report.examples import examples
from leret.evaluation.results import ScoredHop

CORPUS = {"a": Document("a", "Ann", ""), "b": Document("b", "", "")}
QUESTIONS = [Task.question(f"q{i}", f"text {i}", gold=("a", "b")) for i in range(4)]


def rows(values, docs=("a",), failed=()):
    made = []
    for i, value in enumerate(values):
        question = f"q{i}"
        made.append(ScoredHop(question, None, 0, 1, "first", "first", (), (), {"ap": 0.0, "recall": 0.0}))
        made.append(ScoredHop(question, None, 0, 2, "second", "second", docs, (), {"ap": value, "recall": value}))
        if i in failed:
            made.append(ScoredHop(question, None, 0, 3, None, None, (), (), {}, failure="down"))
    return made


def test_the_widest_differences_come_first_and_equal_ones_are_left_out():
    shown = examples(("ipo", rows([1.0, 0.5, 0.0, 0.2])), ("base", rows([0.0, 0.0, 0.5, 0.2])), QUESTIONS, CORPUS, 10)
    assert [(e["question_id"], e["difference"]) for e in shown["improved"]] == [("q0", 1.0), ("q1", 0.5)]
    assert [(e["question_id"], e["difference"]) for e in shown["worsened"]] == [("q2", -0.5)]
    assert examples(("ipo", rows([1.0, 0.5])), ("base", rows([0.0, 0.0])), QUESTIONS, CORPUS, 1)["improved"][1:] == []


def test_a_hop_shows_what_it_added_and_marks_the_gold():
    shown = examples(("ipo", rows([1.0], ("x", "b"))), ("base", rows([0.0], ())), QUESTIONS, CORPUS, 10)["improved"][0]
    first, second = shown["policy"]
    assert (first["found"], first["query"]) == ([], "first")
    assert second["found"] == [{"title": "x", "gold": False}, {"title": "b", "gold": True}]
    assert shown["gold"] == ["Ann", "b"]
    assert shown["rival"][1]["found"] == []


def test_what_failed_is_not_compared():
    shown = examples(("ipo", rows([1.0, 1.0], failed=(0,))), ("base", rows([0.0, 0.0])), QUESTIONS, CORPUS, 10)
    assert [e["question_id"] for e in shown["improved"]] == ["q1"]


def test_ties_come_in_the_order_of_the_ids():
    shown = examples(("ipo", rows([1.0] * 4)), ("base", rows([0.0] * 4)), list(reversed(QUESTIONS)), CORPUS, 2)
    assert [e["question_id"] for e in shown["improved"]] == ["q0", "q1"]
