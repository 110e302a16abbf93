"""`leret rewards test`: check that a reward is highest for a perfect outcome, not a wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from leret.core.types import Outcome, Passage, Task
from leret.rewards import Scoring

UNPROVEN = frozenset(
    {
        "similarity",
        "answer_likelihood",
        "verdict",
        "length_ratio",
        "corpus_length_ratio",
        "distinct1",
        "distinct2",
    }
)
"""Rewards that need a model or a claim, or for which a higher value is not always better."""

_ANSWER = "in the hills above Los Angeles"


def _ranking(*doc_ids: str) -> tuple[Passage, ...]:
    passages = []
    for n, doc_id in enumerate(doc_ids):
        title = f"Title of {doc_id}"
        text = f"The text of document {doc_id}."
        passages.append(Passage(doc_id, title, text, score=9.0 - n))
    return tuple(passages)


GOLD = Outcome(
    Task(
        "gold",
        {"question": "Where was the film shot?"},
        gold=("g1", "g2"),
        answers=(_ANSWER,),
        hops=2,
    ),
    "<think>The film first.</think> where the film was shot",
    {"query": "where the film was shot"},
    _ranking("g1", "g2"),
    {"answer": _ANSWER},
)

WORST = replace(
    GOLD,
    text="",
    outputs={},
    ranking=_ranking("x1", "x2"),
    prediction={"answer": "unknown"},
    n_steps=6,
)

WORSE: Mapping[str, Outcome] = {
    "no gold document found": replace(GOLD, ranking=_ranking("x1", "x2")),
    "one of two gold documents found": replace(GOLD, ranking=_ranking("g1", "x1")),
    "gold below other documents": replace(GOLD, ranking=_ranking("x1", "x2", "g1", "g2")),
    "wrong answer": replace(GOLD, prediction={"answer": "unknown"}),
    "no answer": replace(GOLD, prediction={"answer": ""}),
    "a long answer": replace(GOLD, prediction={"answer": f"{_ANSWER} and {_ANSWER} and elsewhere"}),
    "completion that does not parse": replace(GOLD, text="", outputs={}),
    "six LM calls": replace(GOLD, n_steps=6),
    "everything wrong": WORST,
}


class Proof(NamedTuple):
    """Values of a reward for `GOLD` and `WORST`, and the reward's faults."""

    name: str
    gold: float | None
    worst: float | None
    faults: tuple[str, ...]


def prove(name: str, scoring: Scoring) -> Proof:
    """Return a reward's values and faults.

    Faults are outcomes that get more than `GOLD`, and `WORST` if it does not get less.
    """
    gold = scoring(GOLD)
    worst = scoring(WORST)
    if gold is None:
        return Proof(name, gold, worst, ("the gold outcome gets no value (None)",))
    start = f"the gold outcome gets {gold:g}"
    faults = []
    for case, outcome in WORSE.items():
        value = scoring(outcome)
        if value is not None and value > gold:
            faults.append(f"{start}, {case} gets {value:g}")
    if worst is None or worst >= gold:
        faults.append(f"{start}, but a completely wrong outcome does not get less")
    return Proof(name, gold, worst, tuple(faults))
