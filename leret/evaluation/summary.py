"""summary.json: measures with intervals for every system, and differences between systems.

::

    {"schema": 1, "measures": [...], "n_questions": N, "n_by_measure": {...}, "n_by_type": {...}, "n_hops": H, ...
     "rows": [{"system", "kind", "policy", "prompt", "retriever", "n", "failed", "unparsed", "seconds", "lm_calls",
               "hops": [{"hop": 1, "recall": x, "recall_ci": [lo, hi], ...}, ...],
               "by_type": {"bridge": {"n": n, "hops": [...]}}, "answer": null}],
     "comparisons": [{"a", "b", "measure", "hop", "n", "difference", "ci", "p", "p_holm"}],
     "comparisons_by_hop": [...], "comparisons_by_type": [... with "type"]}

A hop is one search of the program. `comparisons` compares systems after the last hop, on all questions. Rates are in
[0, 1]. A measure without a value for any question, such as recall without gold documents, is left out; `n_by_measure`
counts the questions with a value. A difference is the mean of `a` minus the mean of `b`, over questions with scores for
both. `p_holm` is adjusted separately for each measure and list of comparisons. Future versions may add keys, but never
remove or redefine keys. `leret eval` adds its recipe's keys, `focus` (the delivered policy), `chosen_on` (recall, or
the first measure that applies, by policy on ``choose_on``) and `leaks` (`leret.datasets.leaks`).
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leret.config.evaluation import EvalRecipe
from leret.core.types import Outcome, Task
from leret.evaluation.measures import LABELS, corpus_measures
from leret.evaluation.results import ScoredHop, SystemResults, prediction_of
from leret.evaluation.statistics import (
    Array,
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

_MAIN = ("fact_em", "fact_f1", "recall", "ap", "all_found", "rr", "f1", "verdict")
"""Measures shown in the console table, if computed."""

_COLUMNS = 6
"""Maximum number of measures in the console table without recall."""

LEVEL = 0.05
"""Significance level for adjusted p-values."""


@dataclass(frozen=True)
class Scores:
    """Measures of one system by question and hop, averaged over runs.

    ``values`` are (n_questions, n_hops, n_measures), NaN if the question failed or the measure has no value. A
    run that ended early keeps its last ranking at later hops.
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
    """Compute the part of summary.json that depends on the scored hops; systems and measures keep their input order."""
    ends = (
        row.hop
        for _, results in systems
        for row in results.rows
        if row.failure is None and not row.unparsed
    )
    hops = max(ends, default=1)
    n_by_measure = _counts([results for _, results in systems], measures)
    measures = list(n_by_measure)
    scores = {s.name: score_table(r.rows, questions, hops, measures) for s, r in systems}
    groups = _groups(questions)
    means = {name: _means(scores, members, measures, recipe) for name, members in groups.items()}
    pairs = pairs_of({system.name: system.rivals for system, _ in systems}, recipe.baseline)
    compared = {
        group: compare(
            pairs, {name: s.values[members] for name, s in scores.items()}, measures, recipe
        )
        for group, members in groups.items()
    }
    for group, members in groups.items():
        _set_corpus_measures(
            systems,
            [questions[i] for i in members],
            measures,
            means[group],
            compared[group],
            recipe,
        )
    return {
        "schema": 1,
        "measures": list(measures),
        "n_questions": len(questions),
        "n_by_measure": n_by_measure,
        "n_by_type": {name: len(members) for name, members in groups.items() if name is not None},
        "n_hops": hops,
        "baseline": recipe.baseline,
        "confidence": recipe.confidence,
        "resamples": recipe.resamples,
        "rows": [
            _row(system, results, scores[system.name], means, groups) for system, results in systems
        ],
        "comparisons": with_holm(c for c in compared[None] if c["hop"] == hops),
        "comparisons_by_hop": with_holm(c for c in compared[None] if c["hop"] != hops),
        "comparisons_by_type": [
            {**c, "type": name}
            for name in filter(None, compared)
            for c in with_holm(c for c in compared[name] if c["hop"] == hops)
        ],
    }


def headline(summary: Mapping[str, Any]) -> str | None:
    """Return a sentence about the system with the highest recall; None if all recalls are 0.

    Without gold documents, it is about the main measure. Systems that use the gold documents are left out.
    """
    if "recall" not in summary["measures"]:
        return _headline_of_answers(summary)
    recall = {r["system"]: r["hops"][-1]["recall"] or 0.0 for r in _without_gold(summary)}
    if not any(recall.values()):
        return None
    with_lm = {r["system"] for r in summary["rows"] if r["kind"] != "baseline"}
    best = max(recall, key=lambda name: (recall[name], name == summary["focus"]))
    others = (
        [name for name in recall if name in with_lm]
        if best not in with_lm
        else [summary["baseline"]]
    )
    other = max(
        (name for name in others if name in recall and name != best),
        key=recall.__getitem__,
        default=None,
    )
    share = f"{recall[best]:.0%} of the gold documents"
    if other is None:
        return f"{best} finds the most: {share}"
    pairs = {(c["a"], c["b"]): c for c in summary["comparisons"] if c["measure"] == "recall"}
    p = (pairs.get((best, other)) or pairs.get((other, best)) or {"p_holm": None})["p_holm"]
    significant = p is not None and p < LEVEL
    if best not in with_lm:
        more = "more than every system" if significant else "at least as much as any system"
        return f"{best} finds {more} with an LM: {share}, against {recall[other]:.0%} by {other}"
    raw = f"; the raw question finds {recall[RAW]:.0%}" if RAW in recall and other != RAW else ""
    more = "more than" if significant else "about as much as"
    return f"{best} finds {more} {other}: {share}, against {recall[other]:.0%}{raw}"


def _without_gold(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of systems that do not use the gold documents."""
    return [
        r
        for r in summary["rows"]
        if r["system"].partition("@")[0] != ORACLE and not r.get("best_of")
    ]


def _headline_of_answers(summary: Mapping[str, Any]) -> str | None:
    measure = main_measure(summary["measures"])
    values = {row["system"]: row["hops"][-1][measure] or 0.0 for row in _without_gold(summary)}
    best, *others = sorted(values, key=lambda name: -values[name])
    if not values[best] or not others:
        return None
    pairs = {
        frozenset((c["a"], c["b"])): c["p_holm"]
        for c in summary["comparisons"]
        if c["measure"] == measure
    }
    p = pairs.get(frozenset((best, others[0])))
    more = "has a higher" if p is not None and p < LEVEL else "has about the same"
    figures = f"{values[best]:.3f} against {values[others[0]]:.3f}"
    return f"{best} {more} {LABELS.get(measure, measure)} {'than' if 'higher' in more else 'as'} {others[0]}: {figures}"


def main_measure(measures: Sequence[str]) -> str:
    """Return the measure that chooses policies and orders examples: recall, or the first without gold documents."""
    return "recall" if "recall" in measures else measures[0]


def main_measures(measures: Sequence[str]) -> list[str]:
    """Return the measures of the console table, main measure first."""
    return (
        [m for m in _MAIN if m in measures] if "recall" in measures else list(measures[:_COLUMNS])
    )


def table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns of the console table, and one row per system with its measures after the last hop."""
    measures = main_measures(summary["measures"])
    counts = [
        *(name for name in ("failed", "unparsed") if any(row[name] for row in summary["rows"])),
        "lm_calls",
    ]
    columns = [
        "system",
        *(LABELS.get(m, m) for m in measures),
        *(n.replace("lm_", "LM ") for n in counts),
    ]
    rows = []
    for row in summary["rows"]:
        figures = [
            format_figure(row["hops"][-1], m, with_interval=m == measures[0]) for m in measures
        ]
        rows.append([row["system"], *figures, *(f"{row[name]:,}" for name in counts)])
    return columns, rows


def table_by_hop(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns, and a row of measures per system and hop; a system's last row has its total seconds."""
    columns = ["system", "hop", *(LABELS.get(m, m) for m in summary["measures"]), "seconds"]
    rows = []
    for row in summary["rows"]:
        for hop in row["hops"]:
            figures = [format_figure(hop, m, with_interval=False) for m in summary["measures"]]
            seconds = f"{row['seconds']:.1f}" if hop is row["hops"][-1] else ""
            rows.append([row["system"], str(hop["hop"]), *figures, seconds])
    return columns, rows


def format_figure(hop: Mapping[str, Any], measure: str, with_interval: bool) -> str:
    """Format a measure with three decimals, or ``-`` if it has no value."""
    value, bounds = hop[measure], hop[f"{measure}_ci"]
    if value is None:
        return "-"
    return f"{value:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]" if with_interval else f"{value:.3f}"


def _counts(results: Sequence[SystemResults], measures: Sequence[str]) -> dict[str, int]:
    """Return the number of questions with a value by measure, without measures that have none (unless none has any)."""
    pairs = {
        (name, row.question_id) for one in results for row in one.rows for name in row.measures
    }
    counts = Counter(name for name, _ in pairs)
    return {name: counts[name] for name in measures if counts[name] or not counts}


def score_table(
    rows: Sequence[ScoredHop],
    questions: Sequence[Task],
    n_hops: int,
    measures: Sequence[str],
    *,
    best: bool = False,
) -> Scores:
    """Arrange one system's rows (in any order) by question, hop and measure: the mean over runs.

    ``best`` takes the best run, for the rows with ``best_of`` in results of earlier versions.
    """
    runs: dict[tuple[str, int], dict[int, ScoredHop]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row.hop):
        # an unparsed run ends with one more row: the ranking of its last hop, and the value of the answer
        runs[row.question_id, row.sample][max(1, row.hop - row.unparsed)] = row
    tables: dict[str, list[Array]] = defaultdict(list)
    unparsed = set()
    for (question_id, _), run in runs.items():
        if any(row.failure is not None for row in run.values()):
            continue
        if any(row.unparsed for row in run.values()):
            unparsed.add(question_id)
        table = np.full((n_hops, len(measures)), np.nan)
        for hop in range(n_hops):
            at_hop = run.get(hop + 1)
            table[hop] = (
                [at_hop.measures.get(m, np.nan) for m in measures] if at_hop else table[hop - 1]
            )
        tables[question_id].append(table)
    values = np.full((len(questions), n_hops, len(measures)), np.nan)
    for i, question in enumerate(questions):
        if question.id in tables:
            values[i] = (np.max if best else np.mean)(tables[question.id], axis=0)
    return Scores(values, n_failed=len(questions) - len(tables), n_unparsed=len(unparsed))


def _corpus_rows(
    results: SystemResults,
    questions: Sequence[Task],
    name: str,
    measure: CorpusMeasure,
    field: str | None,
) -> Array:
    """Return the rows of a `CorpusMeasure` by question, averaged over runs; NaN for questions without a value."""
    last = {(row.sample, row.question_id): row for row in results.rows}
    tables = []
    for sample in sorted({sample for sample, _ in last}):
        runs = [(i, last[sample, q.id]) for i, q in enumerate(questions) if (sample, q.id) in last]
        known = [(i, row) for i, row in runs if name in row.measures]
        answers = [
            answer_of(Outcome(questions[i], prediction=prediction_of(row)), field) or ""
            for i, row in known
        ]
        rows = measure.rows(answers, [questions[i].answers for i, _ in known])
        tables.append(np.full((len(questions), rows.shape[1]), np.nan))
        tables[-1][[i for i, _ in known]] = rows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a question without a value in any run
        return np.asarray(np.nanmean(tables, axis=0))


def _set_corpus_measures(
    systems: Sequence[tuple[System, SystemResults]],
    questions: Sequence[Task],
    measures: Sequence[str],
    means: Mapping[str, list[dict[str, Any]]],
    comparisons: Iterable[dict[str, Any]],
    recipe: EvalRecipe,
) -> None:
    """Replace the means and comparisons of measures of all answers together, which only the last hop has."""
    corpus = corpus_measures(recipe.specs)
    for name in filter(corpus.__contains__, measures):
        measure, field = corpus[name]
        rows = {
            system.name: _corpus_rows(results, questions, name, measure, field)
            for system, results in systems
        }
        for system, hops in means.items():
            for hop in hops:
                hop.update({name: None, f"{name}_ci": [None, None]})
            known = rows[system][~np.isnan(rows[system]).any(axis=1)]
            value = json_number(measure.value(known)) if len(known) else None
            hops[-1].update({name: value, f"{name}_ci": corpus_interval(known, measure, recipe)})
        n_hops = max(map(len, means.values()), default=0)
        for pair in (pair for pair in comparisons if pair["measure"] == name):
            pair.update(
                compare_corpus(
                    rows[pair["a"]], rows[pair["b"]], measure, recipe, pair["hop"] == n_hops
                )
            )


def _groups(questions: Sequence[Task]) -> dict[str | None, list[int]]:
    """Map None to the indices of all questions and, if there are several types, each type to its questions' indices."""
    groups: dict[str | None, list[int]] = {None: list(range(len(questions)))}
    types = Counter(question.type for question in questions if question.type)
    if len(types) > 1:
        for name in sorted(types):
            groups[name] = [i for i, question in enumerate(questions) if question.type == name]
    return groups


def _means(
    scores: Mapping[str, Scores],
    members: Sequence[int],
    measures: Sequence[str],
    recipe: EvalRecipe,
) -> dict[str, list[dict[str, Any]]]:
    """Map each system to its means and intervals at every hop."""
    if not scores:
        return {}
    values = np.stack([s.values[members] for s in scores.values()], axis=1)
    flat = values.reshape(len(members), -1)
    bounds = bootstrap_intervals(flat, recipe.resamples, recipe.confidence, recipe.seed)
    means, bounds = nan_mean(flat).reshape(values.shape[1:]), bounds.reshape(*values.shape[1:], 2)
    return {
        system: [
            {"hop": hop + 1}
            | {name: json_number(means[s, hop, m]) for m, name in enumerate(measures)}
            | {
                f"{name}_ci": [json_number(x) for x in bounds[s, hop, m]]
                for m, name in enumerate(measures)
            }
            for hop in range(values.shape[2])
        ]
        for s, system in enumerate(scores)
    }


def _row(
    system: System,
    results: SystemResults,
    scores: Scores,
    means: Mapping[str | None, Mapping[str, list[dict[str, Any]]]],
    groups: Mapping[str | None, Sequence[int]],
) -> dict[str, Any]:
    return {
        "system": system.name,
        "kind": system.kind,
        "policy": system.policy,
        "prompt": None if system.prompt is None else system.prompt.name,
        "retriever": system.retriever,
        "n": len(groups[None]) - scores.n_failed,
        "failed": scores.n_failed,
        "unparsed": scores.n_unparsed,
        "seconds": round(results.seconds, 3),
        "lm_calls": results.lm_calls,
        "best_of": None,  # only results of earlier versions have a number
        "cost": results.cost(max(1, len(results.runs()))),
        "hops": means[None][system.name],
        "by_type": {
            name: {
                "n": int((~np.isnan(scores.values[members]).all(axis=(1, 2))).sum()),
                "hops": means[name][system.name],
            }
            for name, members in groups.items()
            if name is not None
        },
        "answer": {
            name: means[None][system.name][-1][name]
            for name in ("em", "f1")
            if name in means[None][system.name][-1]
        }
        or None,
    }
