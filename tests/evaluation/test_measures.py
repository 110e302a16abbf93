from dataclasses import replace

import pytest

from leret.core.types import STOP, Document, Failure, Hop, LMCall, Passage, Rollout, Task
from leret.evaluation.measures import Scorer, hidden_gold

CORPUS = {i: Document(i, title, "") for i, title in [("a", "Ed Wood (film)"), ("b", "Los Angeles"), ("x", "Oslo")]}
QUESTION = Task.question("q", "In which city was ed wood shot?", gold=("a", "b"), type="bridge")


def named(*names):
    return {name: name for name in names}


def rows(*hops, n_steps=None, failure=None, question=QUESTION):
    """Rows of a rollout; a hop is its query, the ids that are found until then, and the LM calls before it."""
    hops = [hop if len(hop) == 3 else (*hop, n) for n, hop in enumerate(hops, 1)]
    made = tuple(Hop((query,), tuple(Passage(i, "", "", 1.0) for i in found), n) for query, found, n in hops)
    steps = [LMCall("p", {}, (), f"text {n}", None) for n in range(len(hops) if n_steps is None else n_steps)]
    scorer = Scorer(named("recall", "ap", "all_found", "bridge_found"), [question], CORPUS)
    return scorer.rows(Rollout("q", made, failure, steps=tuple(steps)))


def test_every_hop_by_hand():
    first, second = rows(("one", "xa"), ("two", "xab"))
    assert first.measures == {"recall": 0.5, "ap": 0.25, "all_found": 0.0, "bridge_found": 0.0}
    # hits at ranks 2 and 3: (1/2 + 2/3) / 2
    assert second.measures == {"recall": 1.0, "ap": pytest.approx(7 / 12), "all_found": 1.0, "bridge_found": 1.0}
    assert (second.hop, second.query, second.type, second.doc_ids) == (2, "two", "bridge", ("x", "a", "b"))


def test_a_failed_run_has_no_measures_and_one_that_does_not_parse_is_scored_with_what_was_found():
    first, last = rows(("one", "a"), failure=Failure("policy", "down"))
    assert (first.measures, last.measures, last.failure, last.hop) == ({}, {}, "policy: down", 2)
    assert (first.failure, first.lm_calls + last.lm_calls) == (None, 1)

    first, last = rows(("one", "a"), n_steps=2, failure=Failure("parse", "x"))
    assert (first.unparsed, last.unparsed, last.query, last.completion) == (False, True, None, "text 1")
    assert first.measures == last.measures
    scorer = Scorer(named("f1"), [Task.question("q", "?", answer="x")], CORPUS)
    [row] = scorer.rows(Rollout("q", (), Failure("parse", ""), steps=(LMCall("p", {}, (), "", None),)))
    assert row.measures == {"f1": 0.0}
    (only,) = rows()  # a program without a search found nothing
    assert (only.failure, only.measures["recall"]) == (None, 0.0)


@pytest.mark.parametrize(
    ("hops", "n_steps", "completions", "n_calls"),
    [
        ([("one", "a", 2), ("two", "ab", 4)], 5, ["text 1", "text 3"], [2, 3]),  # planner, writer, twice; an answer
        ([("one", "a", 1), ("two", "ab", 1)], 1, ["text 0", "text 0"], [1, 0]),  # one step makes two searches
        ([("", "a", 0), ("two", "ab", 1)], 1, [None, "text 0"], [0, 1]),  # the first search needs no LM
        ([], 2, ["text 1"], [2]),
    ],
)
def test_a_row_is_a_search_and_counts_the_lm_calls_since_the_one_before(hops, n_steps, completions, n_calls):
    found = rows(*hops, n_steps=n_steps)
    assert [row.query for row in found] == ([query for query, *_ in hops] or [None])
    assert ([row.completion for row in found], [row.lm_calls for row in found]) == (completions, n_calls)


@pytest.mark.parametrize(
    ("text", "gold", "hidden"),
    [(QUESTION.text, "ab", "b"), ("Was Los Ángeles or Oslo-Drammen first?", "bx", ""), ("osloite?", "x", "x")],
)
def test_titles_that_the_question_names_are_not_bridges(text, gold, hidden):
    question = Task.question("q", text, gold=tuple(gold))
    assert hidden_gold(question, CORPUS) == tuple(hidden)
    assert ("bridge_found" in rows(("one", "a"), question=question)[0].measures) is bool(hidden)


def test_the_last_row_keeps_the_answer_and_the_picked_ids():
    choice = {"candidates": ["a", "b"], "picked": []}
    steps = [LMCall("write", {}, (), "x", {"id": "no pick"}), LMCall("pick", choice, (), None, {"id": "b"})]
    steps += [LMCall("pick", choice, (), STOP.id, {"id": STOP.id})]
    hops = tuple(Hop(("q",), (), n) for n in (1, 2))
    prediction = {"answer": 7, "why": "x", "context": ["long"]}
    rollout = Rollout("q", hops, prediction=prediction, steps=tuple(steps))
    first, last = Scorer(named("recall"), [QUESTION], CORPUS).rows(rollout)
    assert (first.prediction, first.picked) == (None, ())
    assert (last.prediction, last.picked) == ('{"why": "x", "answer": "7"}', ("b",))
    [row] = Scorer(named("recall"), [QUESTION], CORPUS).rows(replace(rollout, hops=(), prediction={"context": []}))
    assert row.prediction is None
