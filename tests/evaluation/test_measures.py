"""Every hop's accumulated ranking is scored by the rewards' own functions."""

import pytest

from leret.core.types import Document, Failure, Hop, Passage, Rollout, Task
from leret.evaluation.measures import Scorer, hidden_gold

CORPUS = {i: Document(i, title, "") for i, title in [("a", "Ed Wood (film)"), ("b", "Los Angeles"), ("x", "Oslo")]}
QUESTION = Task.question("q", "In which city was ed wood shot?", gold=("a", "b"), type="bridge")


def rows(*hops, failure=None, question=QUESTION):
    """Rows of a rollout; a hop is its query and the ids that are found until then, apart by spaces."""
    made = tuple(
        Hop("write", {}, (), query or "??", query and {"query": query}, tuple(Passage(i, "", "", 1.0) for i in found))
        for query, found in hops
    )
    scorer = Scorer(("recall", "ap", "all_found", "bridge_found"), [question], CORPUS)
    return scorer.rows(Rollout("q", made, failure is None, failure))


def test_every_hop_by_hand():
    first, second = rows(("one", "xa"), ("two", "xab"))
    assert first.measures == {"recall": 0.5, "ap": 0.25, "all_found": 0.0, "bridge_found": 0.0}
    # hits at ranks 2 and 3: (1/2 + 2/3) / 2
    assert second.measures == {"recall": 1.0, "ap": pytest.approx(7 / 12), "all_found": 1.0, "bridge_found": 1.0}
    assert (second.hop, second.query, second.type, second.doc_ids) == (2, "two", "bridge", ("x", "a", "b"))


def test_a_failed_run_has_no_measures_and_says_why():
    first, last = rows(("one", "a"), failure=Failure("policy", "down"))
    assert (first.measures, last.measures, last.failure, last.hop) == ({}, {}, "policy: down", 2)


def test_a_completion_that_does_not_parse_is_scored_with_what_was_found():
    (only,) = rows((None, "a"), failure=Failure("parse", "x"))
    assert (only.unparsed, only.measures["recall"]) == (True, 0.5)
    (only,) = rows()  # a program without a step found nothing
    assert (only.failure, only.measures["recall"]) == (None, 0.0)


@pytest.mark.parametrize(
    ("text", "gold", "hidden"),
    [
        (QUESTION.text, "ab", "b"),
        ("Was Los Ángeles or Oslo-Drammen first?", "bx", ""),
        ("osloite?", "x", "x"),
    ],
)
def test_titles_that_the_question_names_are_not_bridges(text, gold, hidden):
    question = Task.question("q", text, gold=tuple(gold))
    assert hidden_gold(question, CORPUS) == tuple(hidden)
    assert ("bridge_found" in rows(("one", "a"), question=question)[0].measures) is bool(hidden)
