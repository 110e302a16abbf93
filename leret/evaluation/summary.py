"""summary.json: what every system reached, how sure that is, and who differs from whom.

::

    {"schema": 1, "measures": [...], "n_questions": N, "n_by_type": {...}, "n_hops": H, "confidence": .95, ...
     "rows": [{"system", "kind", "policy", "prompt", "n", "failed", "unparsed", "seconds", "lm_calls",
               "hops": [{"hop": 1, "recall": x, "recall_ci": [lo, hi], ...}, ...],
               "by_type": {"bridge": {"n": n, "hops": [...]}}, "answer": null}],
     "comparisons": [{"a", "b", "measure", "hop", "n", "difference", "ci", "p", "p_holm"}],
     "comparisons_by_hop": [...], "comparisons_by_type": [... with "type"]}

`comparisons` stands after the last hop on all questions; the two others hold the earlier hops and the question types.
Rates are in [0, 1]; a difference is a's mean less b's, over the questions that both were scored on. `p_holm` is
adjusted within one measure of one list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leret.core.types import Task
from leret.evaluation.report.labels import LABELS
from leret.evaluation.results import ScoredHop
from leret.evaluation.scores import Array, Scores, n_hops, score_table
from leret.evaluation.statistics import (
    Statistics,
    adjusted,
    bootstrap_intervals,
    compare,
    json_number,
    nan_mean,
    pairs_of,
)

SCHEMA = 1
_MAIN = ("recall", "ap", "all_found")
"""Measures of the console's table."""


@dataclass(frozen=True)
class Evaluated:
    """One system with its results.

    Attributes:
        kind: ``baseline`` (no LM), ``base``, ``prompt`` or ``policy``.
        rivals: systems that it is to be compared with, beside the common baseline.
        seconds: wall clock, the model's loading left out.
    """

    system: str
    kind: str
    policy: str | None
    prompt: str | None
    rows: Sequence[ScoredHop]
    seconds: float
    lm_calls: int
    rivals: tuple[str, ...] = ()


def summarise(
    systems: Sequence[Evaluated],
    questions: Sequence[Task],
    measures: Sequence[str],
    baseline: str,
    statistics: Statistics,
) -> dict[str, Any]:
    """Everything of summary.json that follows from the rows.

    Args:
        systems: in the order of the table.
        questions: all that were asked.
        measures: names of the rows' measures, in the order of the table.
        baseline: the system that each other is compared with; left out where it is not among ``systems``.
        statistics: of intervals and tests.
    """
    hops = max((n_hops(system.rows) for system in systems), default=1)
    ids = [question.id for question in questions]
    scores = [score_table(system.rows, ids, hops, measures) for system in systems]
    groups = _groups(questions)
    means = {name: _means(scores, members, measures, statistics) for name, members in groups.items()}
    rows = [_row(system, scores[i], i, means, groups) for i, system in enumerate(systems)]
    pairs = pairs_of({system.system: system.rivals for system in systems}, baseline)
    compared = {
        group: compare(pairs, _by_system(systems, scores, members), measures, statistics)
        for group, members in groups.items()
    }
    everything = compared.pop(None)
    return {
        "schema": SCHEMA,
        "measures": list(measures),
        "n_questions": len(questions),
        "n_by_type": {str(name): len(members) for name, members in groups.items() if name is not None},
        "n_hops": hops,
        "baseline": baseline,
        "confidence": statistics.confidence,
        "resamples": statistics.resamples,
        "rows": rows,
        "comparisons": adjusted(c for c in everything if c["hop"] == hops),
        "comparisons_by_hop": adjusted(c for c in everything if c["hop"] != hops),
        "comparisons_by_type": [
            {**c, "type": name}
            for name, found in compared.items()
            for c in adjusted(c for c in found if c["hop"] == hops)
        ],
    }


def table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The console's table as plain text: the columns' heads, and a row a system, after the last hop."""
    measures = [m for m in _MAIN if m in summary["measures"]] or summary["measures"][:3]
    counts = ["failed", *(["unparsed"] if any(row["unparsed"] for row in summary["rows"]) else []), "lm_calls"]
    columns = ["system", *(LABELS.get(m, m) for m in measures), *(n.replace("lm_", "LM ") for n in counts)]
    rows = []
    for row in summary["rows"]:
        figures = [_figure(row["hops"][-1], m, with_interval=m == measures[0]) for m in measures]
        rows.append([row["system"], *figures, *(f"{row[name]:,}" for name in counts)])
    return columns, rows


def table_by_hop(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Every measure after every hop: a row a system and hop; the seconds are of all its hops."""
    columns = ["system", "hop", *(LABELS.get(m, m) for m in summary["measures"]), "seconds"]
    rows = []
    for row in summary["rows"]:
        for hop in row["hops"]:
            figures = [_figure(hop, m, with_interval=False) for m in summary["measures"]]
            seconds = f"{row['seconds']:.1f}" if hop is row["hops"][-1] else ""
            rows.append([row["system"], str(hop["hop"]), *figures, seconds])
    return columns, rows


def _figure(hop: Mapping[str, Any], measure: str, with_interval: bool) -> str:
    value, bounds = hop[measure], hop[f"{measure}_ci"]
    if value is None:
        return "-"
    return f"{value:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]" if with_interval else f"{value:.3f}"


def _groups(questions: Sequence[Task]) -> dict[str | None, list[int]]:
    """All questions under None; and by type, where there is more than one."""
    groups: dict[str | None, list[int]] = {None: list(range(len(questions)))}
    types = Counter(question.type for question in questions if question.type)
    if len(types) > 1:
        for name in sorted(types):
            groups[name] = [i for i, question in enumerate(questions) if question.type == name]
    return groups


def _means(
    scores: Sequence[Scores], members: Sequence[int], measures: Sequence[str], statistics: Statistics
) -> list[list[dict[str, Any]]]:
    """For each system, for each hop: the means with their intervals."""
    if not scores:
        return []
    values = np.stack([s.values[members] for s in scores], axis=1)
    flat = values.reshape(len(members), -1)
    bounds = bootstrap_intervals(flat, statistics.resamples, statistics.confidence, statistics.seed)
    means = nan_mean(flat).reshape(values.shape[1:])
    bounds = bounds.reshape(*values.shape[1:], 2)
    return [
        [
            {"hop": hop + 1}
            | {name: json_number(means[s, hop, m]) for m, name in enumerate(measures)}
            | {f"{name}_ci": [json_number(x) for x in bounds[s, hop, m]] for m, name in enumerate(measures)}
            for hop in range(values.shape[2])
        ]
        for s in range(len(scores))
    ]


def _row(
    system: Evaluated,
    scores: Scores,
    i: int,
    means: Mapping[str | None, Sequence[list[dict[str, Any]]]],
    groups: Mapping[str | None, Sequence[int]],
) -> dict[str, Any]:
    return {
        "system": system.system,
        "kind": system.kind,
        "policy": system.policy,
        "prompt": system.prompt,
        "n": len(groups[None]) - scores.n_failed,
        "failed": scores.n_failed,
        "unparsed": scores.n_unparsed,
        "seconds": round(system.seconds, 3),
        "lm_calls": system.lm_calls,
        "hops": means[None][i],
        "by_type": {
            name: {"n": _n_scored(scores, members), "hops": means[name][i]}
            for name, members in groups.items()
            if name is not None
        },
        "answer": None,
    }


def _by_system(systems: Sequence[Evaluated], scores: Sequence[Scores], members: Sequence[int]) -> dict[str, Array]:
    return {system.system: s.values[members] for system, s in zip(systems, scores, strict=True)}


def _n_scored(scores: Scores, members: Sequence[int]) -> int:
    return int((~np.isnan(scores.values[members]).all(axis=(1, 2))).sum())
