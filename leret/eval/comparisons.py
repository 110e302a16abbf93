"""Who differs from whom: paired differences between systems, with intervals and p-values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leret.eval.scores import Array
from leret.eval.significance import bootstrap_intervals, holm, sign_flip_p

__all__ = ["Statistics", "adjusted", "compare", "json_number", "nan_mean", "pairs_of"]


@dataclass(frozen=True)
class Statistics:
    """How intervals and p-values are made."""

    resamples: int = 10_000
    confidence: float = 0.95
    seed: int = 0


def pairs_of(rivals: Mapping[str, Sequence[str]], baseline: str) -> list[tuple[str, str]]:
    """Each system with the baseline, then with its own rivals; no pair twice, in either order.

    Args:
        rivals: by system, in the order of the table; a rival that is not among the systems is passed over.
        baseline: everyone's rival.
    """
    pairs: dict[tuple[str, str], None] = {}
    for system, own in rivals.items():
        for rival in (baseline, *own):
            pair = (system, rival)
            if rival in rivals and rival != system and pair[::-1] not in pairs:
                pairs[pair] = None
    return list(pairs)


def compare(
    pairs: Sequence[tuple[str, str]],
    values: Mapping[str, Array],
    measures: Sequence[str],
    statistics: Statistics,
) -> list[dict[str, Any]]:
    """Every pair at every hop in every measure.

    Args:
        pairs: (a, b); the difference is a's mean less b's.
        values: (n_questions, n_hops, n_measures) by system, NaN where it was not scored.
        measures: names of the last axis.
        statistics: of intervals and tests.

    Returns:
        One mapping a pair, hop and measure, in this order of loops.
    """
    if not pairs:
        return []
    cube = np.stack([values[a] - values[b] for a, b in pairs], axis=1)
    flat = cube.reshape(len(cube), -1)
    means = nan_mean(flat)
    bounds = bootstrap_intervals(flat, statistics.resamples, statistics.confidence, statistics.seed)
    p_values = sign_flip_p(flat, statistics.resamples, statistics.seed)
    counts = (~np.isnan(flat)).sum(axis=0)
    return [
        {
            "a": pairs[i][0],
            "b": pairs[i][1],
            "measure": measures[m],
            "hop": int(hop) + 1,
            "n": int(counts[column]),
            "difference": json_number(means[column]),
            "ci": [json_number(x) for x in bounds[column]],
            "p": json_number(p_values[column]),
        }
        for column, (i, hop, m) in enumerate(np.ndindex(cube.shape[1:]))
    ]


def adjusted(comparisons: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """With Holm's p beside p, each measure a family of its own."""
    kept = list(comparisons)
    by_place: dict[int, float] = {}
    for measure in {c["measure"] for c in kept}:
        family = [i for i, c in enumerate(kept) if c["measure"] == measure]
        p_values = [math.nan if kept[i]["p"] is None else kept[i]["p"] for i in family]
        by_place.update(zip(family, holm(p_values), strict=True))
    return [{**c, "p_holm": json_number(by_place[i])} for i, c in enumerate(kept)]


def nan_mean(values: Array) -> Array:
    """Means of the columns over what is not NaN; NaN for a column of nothing."""
    present = (~np.isnan(values)).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Array = np.nansum(values, axis=0) / present
    return means


def json_number(value: float) -> float | None:
    """Six decimals; None for NaN."""
    return None if math.isnan(value) else round(float(value), 6)
