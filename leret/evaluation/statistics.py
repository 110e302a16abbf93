"""Confidence intervals for means over questions, and significance tests for differences of means.

The same resamples serve all columns of a matrix, so one matrix product computes every system, hop
and measure.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leret.rewards.corpus import CorpusMeasure

Array = NDArray[np.float64]

_CHUNK_CELLS: Final = 4_000_000
"""Approximate number of weights per chunk of resamples (32 MB)."""

_TIE: Final = 1e-12
"""Tolerance for comparing sums, because the order of addition changes the last bits."""


class Resampling(NamedTuple):
    """Settings of intervals and tests; ``confidence`` is in (0, 1)."""

    resamples: int = 10_000
    confidence: float = 0.95
    seed: int = 0


def bootstrap_intervals(
    values: Array, resamples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> Array:
    """Compute percentile bootstrap intervals of column means.

    Questions are drawn with replacement. ``values`` are (n_questions, n_columns), NaN if missing.
    Pass paired differences for paired intervals.

    Returns:
        (n_columns, 2), lower and upper bound; NaN for a column without values.

    Source: Efron (1979), Bootstrap methods; Sakai (SIGIR 2006) for retrieval measures.
    """
    n_questions, n_columns = values.shape
    present = (~np.isnan(values)).astype(np.float64)
    filled = np.nan_to_num(values)
    means = np.empty((resamples, n_columns))
    for start, stop, weights in _resamples(n_questions, resamples, seed):
        with np.errstate(invalid="ignore", divide="ignore"):
            means[start:stop] = (weights @ filled) / (weights @ present)
    return _percentiles(means, confidence)


def _resamples(n_questions: int, resamples: int, seed: int) -> Iterator[tuple[int, int, Array]]:
    """Yield chunks of resamples: their range, and how often each draws each question."""
    rng = np.random.default_rng(seed)
    for start, stop in _chunks(resamples, n_questions):
        drawn = rng.integers(0, n_questions, size=(stop - start, n_questions))
        drawn += np.arange(stop - start)[:, None] * n_questions
        counts = np.bincount(drawn.ravel(), minlength=(stop - start) * n_questions)
        yield start, stop, counts.reshape(stop - start, n_questions).astype(np.float64)


def _percentiles(values: Array, confidence: float) -> Array:
    """Return the central interval of each column; NaN for a column without values."""
    tail = (1 - confidence) / 2 * 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without values
        bounds: Array = np.nanpercentile(values, [tail, 100 - tail], axis=0).T
    return bounds


def sign_flip_p(differences: Array, resamples: int = 10_000, seed: int = 0) -> Array:
    """Compute p-values of a two-sided paired permutation test that flips signs of differences.

    If there are at most ``resamples`` sign assignments, all are enumerated and p is exact.
    Otherwise ``resamples`` are drawn, and the observed assignment is counted as an additional draw,
    so p is never 0.

    ``differences`` are (n_questions, n_columns), a minus b; NaN if a or b is missing.

    Returns:
        (n_columns,) p-values in (0, 1]; NaN for a column without values.

    Source: Fisher's randomization test; Smucker, Allan, Carterette (CIKM 2007) for retrieval
    measures.
    """
    n_questions, n_columns = differences.shape
    filled = np.nan_to_num(differences)
    observed = np.abs(filled.sum(axis=0)) - _TIE
    n_as_large = np.zeros(n_columns)
    for bits in _assignments(n_questions, resamples, seed):
        sums = (bits * 2.0 - 1.0) @ filled
        n_as_large += (np.abs(sums) >= observed).sum(axis=0)
    is_empty = np.isnan(differences).all(axis=0)
    return np.where(is_empty, np.nan, _share(n_as_large, n_questions, resamples))


def _assignments(n_questions: int, resamples: int, seed: int) -> Iterator[NDArray[np.integer[Any]]]:
    """Yield chunks of assignments of 0 or 1 to questions.

    These are all assignments if there are at most ``resamples``, else a sample.
    """
    if 2**n_questions <= resamples:
        for start, stop in _chunks(2**n_questions, max(1, n_questions)):
            yield (np.arange(start, stop)[:, None] >> np.arange(n_questions)) & 1
    else:
        rng = np.random.default_rng(seed)
        for start, stop in _chunks(resamples, n_questions):
            yield rng.integers(0, 2, size=(stop - start, n_questions), dtype=np.int8)


def _share(n_as_large: Array, n_questions: int, resamples: int) -> Array:
    if 2**n_questions <= resamples:
        exact: Array = n_as_large / 2**n_questions
        return exact
    estimate: Array = (n_as_large + 1) / (resamples + 1)
    return estimate


def corpus_interval(
    rows: Array, measure: CorpusMeasure, resampling: Resampling
) -> list[float | None]:
    """Compute the bootstrap interval of a `CorpusMeasure`; ``rows`` are (n_questions, n_counts).

    None if the measure cannot be resampled or there are no rows.
    """
    if not measure.resampled or not len(rows):
        return [None, None]
    values = []
    for *_, weights in _resamples(len(rows), resampling.resamples, resampling.seed):
        values.append(measure.values(weights @ rows))
    [bounds] = _percentiles(np.concatenate(values)[:, None], resampling.confidence)
    return [json_number(bound) for bound in bounds]


def compare_corpus(
    a: Array, b: Array, measure: CorpusMeasure, resampling: Resampling, scored: bool = True
) -> dict[str, Any]:
    """Compute the difference of a `CorpusMeasure`, a minus b, over questions with rows of both.

    None if not ``scored``. The permutation test swaps the answers of a and b to a question.

    Source: Koehn (EMNLP 2004) for the interval; Riezler and Maxwell (2005) for the test.
    """
    both = ~(np.isnan(a).any(axis=1) | np.isnan(b).any(axis=1)) & scored
    n = int(both.sum())
    row: dict[str, Any] = {"n": n, "difference": None, "ci": [None, None], "p": None}
    if not n:
        return row
    a, b = a[both], b[both]
    observed = measure.value(a) - measure.value(b)
    row["difference"] = json_number(observed)
    if not measure.resampled:
        return row
    n_as_large = 0
    for bits in _assignments(n, resampling.resamples, resampling.seed):
        swapped = bits @ (b - a)
        values = measure.values(a.sum(axis=0) + swapped) - measure.values(b.sum(axis=0) - swapped)
        n_as_large += int((np.abs(values) >= abs(observed) - _TIE).sum())
    p = _share(np.array(n_as_large, dtype=float), n, resampling.resamples)
    row["p"] = json_number(float(p))
    n_counts = a.shape[1]

    def difference(sums: Array) -> Array:
        return measure.values(sums[:, :n_counts]) - measure.values(sums[:, n_counts:])

    pair = CorpusMeasure(measure.rows, difference)
    row["ci"] = corpus_interval(np.hstack([a, b]), pair, resampling)
    return row


def _chunks(total: int, width: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_CELLS // width)
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def pairs_of(rivals: Mapping[str, Sequence[str]], baseline: str) -> list[tuple[str, str]]:
    """Pair each system with the baseline and with its rivals, if these were evaluated.

    No pair occurs twice.
    """
    pairs: dict[tuple[str, str], None] = {}
    for system, names in rivals.items():
        for rival in (baseline, *names):
            if rival in rivals and rival != system and (rival, system) not in pairs:
                pairs[system, rival] = None
    return list(pairs)


def compare(
    pairs: Sequence[tuple[str, str]],
    values: Mapping[str, Array],
    measures: Sequence[str],
    resampling: Resampling,
) -> list[dict[str, Any]]:
    """Compute the difference of means, a minus b, for each pair (a, b), hop and measure.

    ``values`` are (n_questions, n_hops, n_measures) by system, NaN if not scored.
    """
    if not pairs:
        return []
    cube = np.stack([values[a] - values[b] for a, b in pairs], axis=1)
    flat = cube.reshape(len(cube), -1)
    means = nan_mean(flat)
    bounds = bootstrap_intervals(flat, *resampling)
    p_values = sign_flip_p(flat, resampling.resamples, resampling.seed)
    counts = (~np.isnan(flat)).sum(axis=0)
    rows = []
    for column, (i, hop, m) in enumerate(np.ndindex(cube.shape[1:])):
        a, b = pairs[i]
        row = {
            "a": a,
            "b": b,
            "measure": measures[m],
            "hop": int(hop) + 1,
            "n": int(counts[column]),
            "difference": json_number(means[column]),
            "ci": [json_number(bound) for bound in bounds[column]],
            "p": json_number(p_values[column]),
        }
        rows.append(row)
    return rows


def effect(differences: Array, confidence: float) -> dict[str, float | None]:
    """Compute the effect size of paired differences, and the smallest mean that a test detects.

    The effect size is the mean divided by the standard deviation (Cohen's d of pairs).
    ``detectable`` is for one two-sided test at level 1 - ``confidence`` that detects it with chance
    80%, by the normal approximation. None without variation.

    Source: Cohen (1988), Statistical power analysis; Sakai (2018), Laboratory experiments in
    information retrieval.
    """
    present = differences[~np.isnan(differences)]
    deviation = present.std(ddof=1) if len(present) > 1 else 0.0
    if deviation < _TIE:
        return {"effect_size": None, "detectable": None}
    normal = NormalDist()
    factor = normal.inv_cdf((1 + confidence) / 2) + normal.inv_cdf(0.8)
    return {
        "effect_size": json_number(present.mean() / deviation),
        "detectable": json_number(factor * deviation / math.sqrt(len(present))),
    }


def with_holm(comparisons: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the Holm-adjusted p-value among rows of the same measure; None if ``p`` is None.

    >>> [c["p_holm"] for c in with_holm({"measure": "ap", "p": p} for p in (0.01, 0.04, 0.03))]
    [0.03, 0.06, 0.06]

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    rows: list[dict[str, Any]] = [{**row, "p_holm": None} for row in comparisons]
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["p"] is not None:
            families[row["measure"]].append(row)
    for family in families.values():
        family.sort(key=itemgetter("p"))
        largest = 0.0
        for rank, row in enumerate(family):
            adjusted = min(1.0, row["p"] * (len(family) - rank))
            largest = max(largest, adjusted)
            row["p_holm"] = json_number(largest)
    return rows


def nan_mean(values: Array) -> Array:
    """Return column means that ignore NaN; NaN for a column without values."""
    present = (~np.isnan(values)).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Array = np.nansum(values, axis=0) / present
    return means


def json_number(value: float) -> float | None:
    """Round to six decimals; return None for NaN."""
    return None if math.isnan(value) else round(float(value), 6)
