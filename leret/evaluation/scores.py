"""Rows of one system as arrays: question, hop, measure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leret.evaluation.results import ScoredHop

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """What one system reached.

    Attributes:
        values: (n_questions, n_hops, n_measures); NaN where the question failed, or the measure has no value on it.
            A question that ended early keeps its last ranking at later hops.
        n_failed: questions that no run of the system finished.
        n_unparsed: questions where some run wrote a completion that does not parse.
    """

    values: Array
    n_failed: int
    n_unparsed: int


def score_table(rows: Sequence[ScoredHop], question_ids: Sequence[str], n_hops: int, measures: Sequence[str]) -> Scores:
    """Arrange rows; several runs of one question are averaged, failed runs left out.

    Args:
        rows: of one system, in any order.
        question_ids: the questions, in the order of the result.
        n_hops: hops of the result.
        measures: names, in the order of the result.
    """
    place = {question_id: i for i, question_id in enumerate(question_ids)}
    runs: dict[tuple[str, int], list[ScoredHop]] = defaultdict(list)
    for row in rows:
        runs[row.question_id, row.sample].append(row)
    per_question: dict[int, list[Array]] = defaultdict(list)
    unparsed = set()
    for (question_id, _), run in runs.items():
        if any(row.failure is not None for row in run):
            continue
        if any(row.unparsed for row in run):
            unparsed.add(question_id)
        per_question[place[question_id]].append(_one_run(run, n_hops, measures))
    values = np.full((len(question_ids), n_hops, len(measures)), np.nan)
    for i, tables in per_question.items():
        values[i] = np.mean(tables, axis=0)
    return Scores(values, n_failed=len(question_ids) - len(per_question), n_unparsed=len(unparsed))


def n_hops(rows: Sequence[ScoredHop]) -> int:
    """The most hops of any run that did not fail; at least 1."""
    return max((row.hop for row in rows if row.failure is None), default=1)


def _one_run(run: Sequence[ScoredHop], hops: int, measures: Sequence[str]) -> Array:
    by_hop: Mapping[int, ScoredHop] = {row.hop: row for row in run}
    table = np.full((hops, len(measures)), np.nan)
    for hop in range(1, hops + 1):
        row = by_hop.get(hop)
        if row is None:
            table[hop - 1] = table[hop - 2]
        else:
            table[hop - 1] = [row.measures.get(name, np.nan) for name in measures]
    return table
