"""`leret rewards test`: is a reward at its maximum where everything is right, and lower where nothing is?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from leret.core.types import Outcome, Passage, Task
from leret.rewards import Scoring

_ANSWER = "in the hills above Los Angeles"


def _found(*doc_ids: str) -> tuple[Passage, ...]:
    return tuple(Passage(d, f"Title of {d}", f"The text of document {d}.", 9.0 - n) for n, d in enumerate(doc_ids))


GOLD = Outcome(
    Task("gold", {"question": "Where was the film shot?"}, gold=("g1", "g2"), answers=(_ANSWER,), hops=2),
    "<think>The film first.</think> where the film was shot",
    {"query": "where the film was shot"},
    _found("g1", "g2"),
    {"answer": _ANSWER},
)
"""All gold documents on top, the reference answer, a completion in its format, one LM call."""

WORST = replace(GOLD, text="", outputs={}, ranking=_found("x1", "x2"), prediction={"answer": "nobody knows"}, n_steps=6)

WORSE: Mapping[str, Outcome] = {
    "no gold document found": replace(GOLD, ranking=_found("x1", "x2")),
    "one of two found": replace(GOLD, ranking=_found("g1", "x1")),
    "gold below other documents": replace(GOLD, ranking=_found("x1", "x2", "g1", "g2")),
    "another answer": replace(GOLD, prediction={"answer": "nobody knows"}),
    "no answer": replace(GOLD, prediction={"answer": ""}),
    "a long answer": replace(GOLD, prediction={"answer": f"{_ANSWER} and {_ANSWER} and elsewhere"}),
    "nothing parsed": replace(GOLD, text="", outputs={}),
    "six LM calls": replace(GOLD, n_steps=6),
    "all of it wrong": WORST,
}
"""Each differs from `GOLD` in what its name says."""


class Proof(NamedTuple):
    """What a reward gives for `GOLD` and `WORST`, and what is wrong with it."""

    name: str
    gold: float | None
    worst: float | None
    faults: tuple[str, ...]


def prove(name: str, scoring: Scoring) -> Proof:
    """That nothing is worth more than the gold outcome, and that all of it wrong is worth less."""
    gold, worst = (scoring.alone(scoring.values(outcome)) for outcome in (GOLD, WORST))
    if gold is None:
        return Proof(name, gold, worst, ("has no value for the gold outcome",))
    values = {what: scoring.alone(scoring.values(outcome)) for what, outcome in WORSE.items()}
    faults = [f"{what} is worth {value:g}" for what, value in values.items() if value is not None and value > gold]
    if worst is None or worst >= gold:
        faults.append("all of it wrong is worth no less")
    return Proof(name, gold, worst, tuple(f"the gold outcome is worth {gold:g}, {fault}" for fault in faults))
