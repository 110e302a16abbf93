"""summary.json: measures with intervals for every system, and differences between systems.

::

    {"schema": 1, "measures": [...], "n_questions": N, "n_by_measure": {...}, "n_by_type": {...},
     "n_hops": H, ...
     "rows": [{"system", "kind", "policy", "prompt", "retriever", "n", "failed", "unparsed",
               "seconds", "lm_calls",
               "hops": [{"hop": 1, "recall": x, "recall_ci": [lo, hi], ...}, ...],
               "by_type": {"bridge": {"n": n, "hops": [...]}}, "answer": null}],
     "comparisons": [{"a", "b", "measure", "hop", "n", "difference", "ci", "p", "p_holm"}],
     "comparisons_by_hop": [...], "comparisons_by_type": [... with "type"]}

A hop is one search of the program. `comparisons` compares systems after the last hop, on all
questions. Rates are in [0, 1]. A measure without a value for any question, such as recall without
gold documents, is left out; `n_by_measure` counts the questions with a value. A difference is the
mean of `a` minus the mean of `b`, over questions with scores for both. `p_holm` is adjusted
separately for each measure and list of comparisons. Future versions may add keys, but never remove
or redefine keys. `leret eval` adds its recipe's keys, `focus` (the delivered policy), `chosen_on`
(recall, or the first measure that applies, by policy on ``choose_on``) and `leaks`
(`leret.datasets.leaks`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leret.config.evaluation import EvalRecipe, label, main_measure
from leret.core.types import Outcome, Task
from leret.evaluation.measures import LABELS, corpus_measures
from leret.evaluation.results import ScoredHop, SystemResults, prediction_of
from leret.evaluation.statistics import (
    Array,
    Resampling,
    bootstrap_intervals,
    compare,
    compare_corpus,
    corpus_interval,
    json_number,
    nan_mean,
    pairs_of,
    with_holm,
)
from leret.evaluation.systems import ORACLE, RAW, System
from leret.rewards.answers import answer_of
from leret.rewards.corpus import CorpusMeasure

Summary = Mapping[str, Any]
"""Content of summary.json, as in the module docstring."""

_MAIN = ("fact_em", "fact_f1", "recall", "ap", "all_found", "rr", "f1", "verdict")
"""Measures shown in the console table, if computed."""

_COLUMNS = 6
"""Maximum number of measures in the console table without recall."""

LEVEL = 0.05
"""Significance level for adjusted p-values."""


@dataclass(frozen=True)
class Scores:
    """Measures of one system by question and hop, averaged over runs.

    ``values`` are (n_questions, n_hops, n_measures), NaN if the question failed or the measure has
    no value. A run that ended early keeps its last ranking at later hops.
    """

    values: Array
    n_failed: int  # questions without a finished run
    n_unparsed: int  # questions with a run that ended at an unparsed completion


def summarise(
    systems: Sequence[tuple[System, SystemResults]],
    questions: Sequence[Task],
    measures: Sequence[str],
    recipe: EvalRecipe,
) -> dict[str, Any]:
    """Compute the part of summary.json that depends on the scored hops.

    Systems and measures keep their input order.
    """
    resampling = Resampling(recipe.resamples, recipe.confidence, recipe.seed)
    n_hops = _last_hop(systems)
    n_by_measure = _counts(systems, measures)
    measures = list(n_by_measure)
    scores = {}
    for system, results in systems:
        scores[system.name] = score_table(results.rows, questions, n_hops, measures)

    pairs = pairs_of({system.name: system.rivals for system, _ in systems}, recipe.baseline)
    groups = _groups(questions)
    corpus = corpus_measures(recipe.specs)
    means = {}
    compared = {}
    for group, members in groups.items():
        values = {name: table.values[members] for name, table in scores.items()}
        means[group] = _means(values, measures, resampling)
        compared[group] = compare(pairs, values, measures, resampling)
        group_questions = [questions[i] for i in members]
        _set_corpus_measures(
            systems, group_questions, measures, means[group], compared[group], corpus, resampling
        )

    rows = [
        _row(system, results, scores[system.name], means, groups) for system, results in systems
    ]
    n_by_type = {name: len(members) for name, members in groups.items() if name is not None}
    by_type = []
    for group, comparisons in compared.items():
        if group is not None:
            for pair in with_holm(pair for pair in comparisons if pair["hop"] == n_hops):
                by_type.append({**pair, "type": group})
    return {
        "schema": 1,
        "measures": measures,
        "n_questions": len(questions),
        "n_by_measure": n_by_measure,
        "n_by_type": n_by_type,
        "n_hops": n_hops,
        "baseline": recipe.baseline,
        "confidence": recipe.confidence,
        "resamples": recipe.resamples,
        "rows": rows,
        "comparisons": with_holm(pair for pair in compared[None] if pair["hop"] == n_hops),
        "comparisons_by_hop": with_holm(pair for pair in compared[None] if pair["hop"] != n_hops),
        "comparisons_by_type": by_type,
    }


def _last_hop(systems: Sequence[tuple[System, SystemResults]]) -> int:
    last = 1
    for _, results in systems:
        for row in results.rows:
            if row.failure is None and not row.unparsed:
                last = max(last, row.hop)
    return last


def headline(summary: Summary) -> str | None:
    """Return a sentence about the system with the highest recall; None if all recalls are 0.

    Without gold documents, it is about the main measure. Systems that use the gold documents are
    left out.
    """
    if "recall" not in summary["measures"]:
        return _headline_of_answers(summary)
    recall = _values_without_gold(summary, "recall")
    if not any(recall.values()):
        return None
    best = max(recall, key=lambda name: (recall[name], name == summary["focus"]))
    share = f"{recall[best]:.0%} of the gold documents"
    with_lm = {row["system"] for row in summary["rows"] if row["kind"] != "baseline"}
    rivals = [summary["baseline"]] if best in with_lm else list(with_lm)
    candidates = [name for name in recall if name in rivals and name != best]
    if not candidates:
        return f"{best} finds the most: {share}"
    rival = max(candidates, key=recall.__getitem__)
    significant = _is_significant(summary, "recall", best, rival)
    if best not in with_lm:
        more = "more than every system" if significant else "at least as much as any system"
        return f"{best} finds {more} with an LM: {share}, against {recall[rival]:.0%} by {rival}"
    more = "more than" if significant else "about as much as"
    sentence = f"{best} finds {more} {rival}: {share}, against {recall[rival]:.0%}"
    if RAW in recall and rival != RAW:
        sentence += f"; the raw question finds {recall[RAW]:.0%}"
    return sentence


def _values_without_gold(summary: Summary, measure: str) -> dict[str, float]:
    """Return a measure after the last hop, for the systems that do not use the gold documents."""
    values = {}
    for row in summary["rows"]:
        method = row["system"].partition("@")[0]
        if method != ORACLE:
            values[row["system"]] = row["hops"][-1][measure] or 0.0
    return values


def _is_significant(summary: Summary, measure: str, system: str, rival: str) -> bool:
    """Return True if two systems differ significantly after the last hop."""
    for pair in summary["comparisons"]:
        if pair["measure"] == measure and {pair["a"], pair["b"]} == {system, rival}:
            return pair["p_holm"] is not None and pair["p_holm"] < LEVEL
    return False


def _headline_of_answers(summary: Summary) -> str | None:
    measure = main_measure(summary["measures"])
    values = _values_without_gold(summary, measure)
    best, *rivals = sorted(values, key=lambda name: -values[name])
    if not values[best] or not rivals:
        return None
    rival = rivals[0]
    label = LABELS.get(measure, measure)
    relation = f"about the same {label} as"
    if _is_significant(summary, measure, best, rival):
        relation = f"a higher {label} than"
    return f"{best} has {relation} {rival}: {values[best]:.3f} against {values[rival]:.3f}"


def main_measures(measures: Sequence[str]) -> list[str]:
    """Return the measures of the console table, main measure first."""
    if "recall" not in measures:
        return list(measures[:_COLUMNS])
    return [measure for measure in _MAIN if measure in measures]


def table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return the columns of the console table, and a row per system with its last measures."""
    measures = main_measures(summary["measures"])
    counts = []
    for name in ("failed", "unparsed"):
        if any(row[name] for row in summary["rows"]):
            counts.append(name)
    counts.append("lm_calls")
    labels = [LABELS.get(measure, measure) for measure in measures]
    columns = ["system", *labels, *(name.replace("lm_", "LM ") for name in counts)]
    rows = []
    for row in summary["rows"]:
        cells = [label(row["system"])]
        for measure in measures:
            is_main = measure == measures[0]
            cells.append(format_figure(row["hops"][-1], measure, with_interval=is_main))
        for name in counts:
            cells.append(f"{row[name]:,}")
        rows.append(cells)
    return columns, rows


def format_figure(hop: Mapping[str, Any], measure: str, with_interval: bool) -> str:
    """Format a measure with three decimals, or ``-`` if it has no value."""
    value = hop[measure]
    if value is None:
        return "-"
    text = f"{value:.3f}"
    if with_interval:
        low, high = hop[f"{measure}_ci"]
        text += f" [{low:.3f}, {high:.3f}]"
    return text


def _counts(
    systems: Sequence[tuple[System, SystemResults]], measures: Sequence[str]
) -> dict[str, int]:
    """Return the number of questions with a value by measure.

    Measures without values are left out, unless no measure has any.
    """
    scored: dict[str, set[str]] = defaultdict(set)
    for _, results in systems:
        for row in results.rows:
            for measure in row.measures:
                scored[measure].add(row.question_id)
    if not scored:
        return dict.fromkeys(measures, 0)
    return {measure: len(scored[measure]) for measure in measures if measure in scored}


def score_table(
    rows: Sequence[ScoredHop],
    questions: Sequence[Task],
    n_hops: int,
    measures: Sequence[str],
) -> Scores:
    """Arrange rows of a system (in any order) by question, hop and measure: the mean over runs."""
    runs: dict[tuple[str, int], dict[int, ScoredHop]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row.hop):
        # an unparsed run ends with one more row: its last ranking, and the value of the answer
        hop = max(1, row.hop - row.unparsed)
        runs[row.question_id, row.sample][hop] = row
    tables: dict[str, list[Array]] = defaultdict(list)
    unparsed = set()
    for (question_id, _), run in runs.items():
        if any(row.failure is not None for row in run.values()):
            continue
        if any(row.unparsed for row in run.values()):
            unparsed.add(question_id)
        tables[question_id].append(_run_table(run, n_hops, measures))
    values = np.full((len(questions), n_hops, len(measures)), np.nan)
    for i, question in enumerate(questions):
        if question.id in tables:
            values[i] = np.mean(tables[question.id], axis=0)
    return Scores(values, n_failed=len(questions) - len(tables), n_unparsed=len(unparsed))


def _run_table(run: Mapping[int, ScoredHop], n_hops: int, measures: Sequence[str]) -> Array:
    """Arrange the rows of a run by hop and measure; later hops repeat the last row."""
    table = np.full((n_hops, len(measures)), np.nan)
    for hop in range(n_hops):
        row = run.get(hop + 1)
        if row is not None:
            table[hop] = [row.measures.get(measure, np.nan) for measure in measures]
        elif hop > 0:
            table[hop] = table[hop - 1]
    return table


def _corpus_rows(
    results: SystemResults,
    questions: Sequence[Task],
    name: str,
    measure: CorpusMeasure,
    field: str | None,
) -> Array:
    """Return the rows of a `CorpusMeasure` by question, averaged over runs.

    Questions without a value have NaN.
    """
    last = {(row.sample, row.question_id): row for row in results.rows}
    tables = []
    for sample in sorted({row.sample for row in results.rows}):
        scored = []
        answers = []
        for i, question in enumerate(questions):
            row = last.get((sample, question.id))
            if row is not None and name in row.measures:
                outcome = Outcome(question, prediction=prediction_of(row))
                answers.append(answer_of(outcome, field) or "")
                scored.append(i)
        rows = measure.rows(answers, [questions[i].answers for i in scored])
        table = np.full((len(questions), rows.shape[1]), np.nan)
        table[scored] = rows
        tables.append(table)
    return nan_mean(np.array(tables))


def _set_corpus_measures(
    systems: Sequence[tuple[System, SystemResults]],
    questions: Sequence[Task],
    measures: Sequence[str],
    means: Mapping[str, list[dict[str, Any]]],
    comparisons: Iterable[dict[str, Any]],
    corpus: Mapping[str, tuple[CorpusMeasure, str | None]],
    resampling: Resampling,
) -> None:
    """Replace the means and comparisons of measures of all answers together.

    Only the last hop has such measures.
    """
    n_hops = max(map(len, means.values()), default=0)
    for name, (measure, field) in corpus.items():
        if name not in measures:
            continue
        rows = {}
        for system, results in systems:
            rows[system.name] = _corpus_rows(results, questions, name, measure, field)
        for system_name, hops in means.items():
            for hop in hops:
                hop[name] = None
                hop[f"{name}_ci"] = [None, None]
            is_missing = np.isnan(rows[system_name]).any(axis=1)
            scored = rows[system_name][~is_missing]
            if len(scored):
                hops[-1][name] = json_number(measure.value(scored))
            hops[-1][f"{name}_ci"] = corpus_interval(scored, measure, resampling)
        for pair in comparisons:
            if pair["measure"] == name:
                is_last = pair["hop"] == n_hops
                a, b = rows[pair["a"]], rows[pair["b"]]
                pair.update(compare_corpus(a, b, measure, resampling, is_last))


def _groups(questions: Sequence[Task]) -> dict[str | None, list[int]]:
    """Map None to the indices of all questions, and each type to the indices of its questions.

    Types are left out if there is only one.
    """
    groups: dict[str | None, list[int]] = {None: list(range(len(questions)))}
    types = {question.type for question in questions if question.type}
    if len(types) > 1:
        for name in sorted(types):
            groups[name] = [i for i, question in enumerate(questions) if question.type == name]
    return groups


def _means(
    values: Mapping[str, Array], measures: Sequence[str], resampling: Resampling
) -> dict[str, list[dict[str, Any]]]:
    """Map each system to its means and intervals at every hop."""
    if not values:
        return {}
    cube = np.stack(list(values.values()), axis=1)
    flat = cube.reshape(len(cube), -1)
    intervals = bootstrap_intervals(flat, *resampling)
    bounds = intervals.reshape(*cube.shape[1:], 2)
    means = nan_mean(flat).reshape(cube.shape[1:])
    hops: dict[str, list[dict[str, Any]]] = {}
    for s, system in enumerate(values):
        hops[system] = []
        for hop in range(cube.shape[2]):
            row: dict[str, Any] = {"hop": hop + 1}
            for m, measure in enumerate(measures):
                row[measure] = json_number(means[s, hop, m])
            for m, measure in enumerate(measures):
                row[f"{measure}_ci"] = [json_number(bound) for bound in bounds[s, hop, m]]
            hops[system].append(row)
    return hops


def _row(
    system: System,
    results: SystemResults,
    scores: Scores,
    means: Mapping[str | None, Mapping[str, list[dict[str, Any]]]],
    groups: Mapping[str | None, Sequence[int]],
) -> dict[str, Any]:
    hops = means[None][system.name]
    by_type = {}
    for name, members in groups.items():
        if name is not None:
            has_value = ~np.isnan(scores.values[members]).all(axis=(1, 2))
            by_type[name] = {"n": int(has_value.sum()), "hops": means[name][system.name]}
    answer = {name: hops[-1][name] for name in ("em", "f1") if name in hops[-1]}
    n_runs = len(results.runs())
    return {
        "system": system.name,
        "kind": system.kind,
        "policy": system.policy,
        "prompt": system.prompt.name if system.prompt else None,
        "retriever": system.retriever,
        "n": len(groups[None]) - scores.n_failed,
        "failed": scores.n_failed,
        "unparsed": scores.n_unparsed,
        "seconds": round(results.seconds, 3),
        "lm_calls": results.lm_calls,
        "cost": results.cost(max(1, n_runs)),
        "hops": hops,
        "by_type": by_type,
        "answer": answer or None,
    }
