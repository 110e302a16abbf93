"""Every hop's accumulated ranking is scored by the rewards' own functions."""

import pytest

from leret.core.errors import ConfigError
from leret.core.types import Document, Failure, Hop, Passage, Rollout, Task
from leret.evaluation.measures import Scorer, all_measures, hidden_gold

CORPUS = {i: Document(i, title, "") for i, title in [("a", "Ed Wood (film)"), ("b", "Los Angeles"), ("x", "Oslo")]}
QUESTION = Task.question("q", "In which city was ed wood shot?", gold=("a", "b"), type="bridge")


def ranking(*ids):
    return tuple(Passage(i, "", "", 9.0 - n) for n, i in enumerate(ids))


def hop(query, completion, found):
    return Hop("write", {}, (), completion, query and {"query": query}, found)


def rollout(*hops, failure=None):
    return Rollout("q", hops, failure is None, failure)


def rows(trace, names=("recall", "ap", "all_found", "bridge_found")):
    return Scorer(names, [QUESTION], CORPUS).rows(trace)


def test_every_hop_by_hand():
    first, second = rows(rollout(hop("one", "one", ranking("x", "a")), hop("two", "two", ranking("x", "a", "b"))))
    assert first.measures == {"recall": 0.5, "ap": 0.25, "all_found": 0.0, "bridge_found": 0.0}
    # hits at ranks 2 and 3: (1/2 + 2/3) / 2
    assert second.measures == {"recall": 1.0, "ap": pytest.approx(7 / 12), "all_found": 1.0, "bridge_found": 1.0}
    assert (second.hop, second.query, second.type, second.doc_ids) == (2, "two", "bridge", ("x", "a", "b"))


def test_a_failed_run_has_no_measures_and_says_why():
    first, last = rows(rollout(hop("one", "one", ranking("a")), failure=Failure("policy", "down")))
    assert (first.measures, last.measures, last.failure, last.hop) == ({}, {}, "policy: down", 2)


def test_a_completion_that_does_not_parse_is_scored_with_what_was_found():
    (only,) = rows(rollout(hop(None, "??", ranking("a")), failure=Failure("parse", "x")))
    assert (only.unparsed, only.measures["recall"]) == (True, 0.5)
    (only,) = rows(rollout())  # a program without a step found nothing
    assert (only.failure, only.measures["recall"]) == (None, 0.0)


def test_titles_that_the_question_names_are_not_bridges():
    assert hidden_gold(QUESTION, CORPUS) == ("b",)
    assert hidden_gold(Task.question("q", "Was Los Ángeles or Oslo-Drammen first?", gold=("b", "x")), CORPUS) == ()
    assert hidden_gold(Task.question("q", "osloite?", gold=("x",)), CORPUS) == ("x",)
    named = Scorer(("bridge_found",), [Task.question("q", "Ed Wood and Los Angeles?", gold=("a", "b"))], CORPUS)
    assert named.rows(rollout(hop("x", "x", ranking("a"))))[0].measures == {}  # no bridge, no value


def test_a_recipes_measures_come_first_and_the_reports_are_always_there():
    assert all_measures(["ndcg", "recall"]) == ("ndcg", "recall", "ap", "all_found", "bridge_found")
    with pytest.raises(ConfigError, match="measures: unknown measure 'recal'"):
        all_measures(["recal"])
