import pytest

from leret.core.types import Document, Task
from leret.evaluation.report.examples import examples
from leret.evaluation.results import ScoredHop

CORPUS = {"a": Document("a", "Ann", ""), "b": Document("b", "", "")}
QUESTIONS = [Task.question(f"q{i}", f"text {i}", gold=("a", "b")) for i in range(4)]


def shown(ours, theirs, n=10, docs=("a",), failed=()):
    rows = {"ipo": [], "base": []}
    for name, values, found in (("ipo", ours, docs), ("base", theirs, ())):
        for i, value in enumerate(values):
            hops = [("first", (), {"ap": 0.0}), ("second", found, {"ap": value})]
            rows[name] += [ScoredHop(f"q{i}", None, 0, n, q, q, ids, (), ap) for n, (q, ids, ap) in enumerate(hops, 1)]
    rows["ipo"] += [ScoredHop(f"q{i}", None, 0, 3, None, None, (), (), {}, failure="down") for i in failed]
    return examples(*rows.items(), QUESTIONS[::-1], CORPUS, n)


@pytest.mark.parametrize(
    ("ours", "theirs", "more", "improved", "worsened"),
    [
        ([1.0, 0.5, 0.0, 0.2], [0.0, 0.0, 0.5, 0.2], {}, [("q0", 1.0), ("q1", 0.5)], [("q2", -0.5)]),  # not equal ones
        ([1.0] * 4, [0.0] * 4, {"n": 2}, [("q0", 1.0), ("q1", 1.0)], []),  # then by id
        ([1.0, 1.0], [0.0, 0.0], {"failed": (0,)}, [("q1", 1.0)], []),  # what failed is not compared
    ],
)
def test_the_widest_differences_come_first(ours, theirs, more, improved, worsened):
    found = shown(ours, theirs, **more)
    assert [(e["question_id"], e["difference"]) for e in found["improved"]] == improved
    assert [(e["question_id"], e["difference"]) for e in found["worsened"]] == worsened


def test_a_hop_shows_what_it_added_and_marks_the_gold():
    (example,) = shown([1.0], [0.0], docs=("x", "b"))["improved"]
    added = [{"title": "x", "gold": False}, {"title": "b", "gold": True}]
    assert [(hop["query"], hop["found"]) for hop in example["policy"]] == [("first", []), ("second", added)]
    assert (example["gold"], example["rival"][1]["found"]) == (["Ann", "b"], [])


def test_an_example_shows_both_answers_and_unscored_questions_are_left_out():
    def answered(value, prediction, measures=None):
        return [ScoredHop("q", None, 0, 1, "x", "x", (), (), measures or {"f1": value}, prediction=prediction)]

    question = Task("q", {"question": "?"}, answers=("Rome",))
    ours, theirs = answered(1.0, '{"answer": "Rome"}'), answered(0.0, '{"reply": "r", "why": "w"}')
    [example] = examples(("ipo", ours), ("base", theirs), [question], {}, 1, "f1")["improved"]
    assert example["answers"] == {"policy": "Rome", "rival": "reply: r; why: w"}
    unscored = answered(0.0, None, {"em": 1.0})
    assert examples(("ipo", ours), ("base", unscored), [question], {}, 1, "f1")["improved"] == []
