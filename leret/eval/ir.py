"""Measures of rankings by ir_measures, under the names that the field knows them by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leret.errors import ConfigError
from leret.eval.trec import falling
from leret.types import Question, Ranking

__all__ = ["cutoff", "parsed", "reward_name", "values"]

_OURS = {"R": "recall", "AP": "ap", "RR": "rr", "nDCG": "ndcg", "Success": "success"}
"""ir_measures' name of a measure, and that of our reward function."""

_OTHERS = ("P", "Rprec")
_DEEPEST = 2**31 - 1
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_NEAR = {"map": "AP", "mrr": "RR", "precision": "P", **_THEIRS}
"""What else they are called, in lower case."""


def parsed(names: Sequence[str]) -> dict[str, Any]:
    """Measures by their canonical names, in the order given.

    Args:
        names: as in ``R@10``, ``AP``, ``nDCG@10``; the names of leret's rewards are understood too (``recall@10``).

    Raises:
        ConfigError: some are no measures; all of them are listed.
    """
    import ir_measures

    found: dict[str, Any] = {}
    problems = []
    for name in names:
        base, at, text = name.strip().partition("@")
        base, cut = _THEIRS.get(base, base), _cut(text)
        known = base in _OURS or base in _OTHERS
        if not known or (at and cut is None) or (base == "Rprec" and at):
            near = _NEAR.get(base.lower())
            meant = f"did you mean {near}{at}{text}? There" if near and not known else "there"
            problems.append(
                f"measures: {name!r} is none; {meant} are {', '.join([*_OURS, *_OTHERS])}, as in R@10 and AP, "
                f"with cut-offs from 1 to {_DEEPEST}"
            )
        elif base in {"R", "P", "Success"} and not at:
            problems.append(f"measures: {name} needs a cut-off; write {base}@10, say")
        else:
            measure = ir_measures.parse_measure(f"{base}@{cut}" if at else base)
            found[str(measure)] = measure
    if problems or not found:
        raise ConfigError(problems or "measures: none is named; write R@10,AP, say")
    return found


def cutoff(measure: str) -> int | None:
    """Documents that a measure looks at; None where it looks at all."""
    cut = measure.partition("@")[2]
    return int(cut) if cut else None


def reward_name(measure: str) -> str | None:
    """Our reward function of a measure, as `leret.rewards.ranking.measure` takes it; None where there is none."""
    base, at, cut = measure.partition("@")
    return f"{_OURS[base]}{at}{cut}" if base in _OURS else None


def values(
    measures: Mapping[str, Any], questions: Sequence[Question], rankings: Sequence[Ranking]
) -> NDArray[np.float64]:
    """Every measure of every question.

    A question whose ranking is empty counts with 0. Readers of TREC runs sort by score in single precision; a score
    that does not fall is made to, so that the order that was retrieved is the order that is measured. The library under
    ir_measures is written in C, and fails on a NUL or half a surrogate pair in an id: it gets numbers.

    Args:
        measures: of `parsed`.
        questions: each with gold documents.
        rankings: of the questions.

    Returns:
        (n_questions, n_measures).
    """
    import ir_measures

    column = {name: i for i, name in enumerate(measures)}
    doc_ids = [doc_id for q in questions for doc_id in q.gold] + [p.doc_id for ranking in rankings for p in ranking]
    number = {doc_id: str(i) for i, doc_id in enumerate(dict.fromkeys(doc_ids))}
    qrels = [
        ir_measures.Qrel(str(place), number[doc_id], grade)
        for place, question in enumerate(questions)
        for doc_id, grade in question.grades.items()
    ]
    run = [
        ir_measures.ScoredDoc(str(place), number[passage.doc_id], score)
        for place, ranking in enumerate(rankings)
        for passage, score in zip(ranking, falling([p.score for p in ranking]), strict=True)
    ]
    found = np.zeros((len(questions), len(measures)))
    if run:
        for metric in ir_measures.iter_calc(list(measures.values()), qrels, run):
            found[int(metric.query_id), column[str(metric.measure)]] = metric.value
    return found


def _cut(text: str) -> int | None:
    """A cut-off; None where the text is none."""
    cut = int(text) if text.isdecimal() and len(text) <= len(str(_DEEPEST)) else 0
    return cut if 0 < cut <= _DEEPEST else None
