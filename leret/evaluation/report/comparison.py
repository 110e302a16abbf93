"""Comparison of evaluated runs, for `leret compare`.

Runs with equal recipes, except for seeds, form a group. The scores of a question are averaged over the runs of a group
before the tests. So intervals and p-values are about questions, for these trainings; the means by run show how much the
trainings differ. In one group, systems are compared in the pairs of its evaluation. Otherwise each system is compared
with the same system of the first group, and the delivered policy with the delivered policy. Differences are paired, on
the questions that both sides have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from leret.config.data import GENERATED
from leret.config.evaluation import EvalRecipe
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.core.stages import flat
from leret.core.types import Task
from leret.evaluation import statistics
from leret.evaluation.measures import LABELS
from leret.evaluation.results import read_rows
from leret.evaluation.summary import format_figure, main_measure, main_measures, score_table
from leret.rewards.corpus import CORPUS

_Scores = dict[tuple[str | None, str], statistics.Array]
"""Measures after the last hop by corpus digest and question id, because each generated world has its own questions."""

_ORDER = ("policy", "prompt", "base", "baseline")
"""Kinds of systems in the order of their differences."""

WORDS = (
    "effect size: the mean difference divided by its standard deviation over questions (0.2 is small, 0.8 large); "
    "detectable: the smallest difference that this number of questions shows in four of five tests"
)

_FREE = {
    "seed",
    "limit",
    "part",
    "split",
    "skip_invalid",
}  # keys of data that change neither documents nor labels


def compare_runs(
    runs: Sequence[Run], measure: str | None = None, evaluation: str | None = None
) -> dict[str, Any]:
    """Compare systems by a measure, by default the main one.

    Returns:
        ``measure``, ``measures``, ``groups`` (paths by name), and the rows of `tables`: ``systems``, ``comparisons``.

    Raises:
        RunError: a run is not evaluated.
        ConfigError: data, corpus, split or k differ, or the runs do not share the measure or any question.
    """
    summaries, groups = [read_summary(run, evaluation) for run in runs], _groups(runs)
    _refuse_differences(runs, summaries)
    measures = [
        m
        for m in summaries[0]["measures"]
        if m not in CORPUS and all(m in s["measures"] for s in summaries)
    ]
    if not measures or (measure or measures[0]) not in measures:
        known = ", ".join(measures) or "none"
        raise ConfigError(
            f"--measure: {measure!r} is not a mean over questions in every run; available: {known}"
        )
    measure = measure or main_measure(measures)
    measures.sort(key=lambda name: name != measure)
    scores = [_scores(run, summary, measures) for run, summary in zip(runs, summaries, strict=True)]
    entries = {
        _label(groups, group, system): [scores[i][system] for i in members]
        for group, members in groups.items()
        for system in scores[members[0]]
        if all(system in scores[i] for i in members)
    }
    recipe = EvalRecipe(**{key: summaries[0][key] for key in ("resamples", "confidence", "seed")})
    pairs = [
        pair for pair in dict.fromkeys(_pairs(groups, summaries)) if set(pair) <= entries.keys()
    ]
    rows = [{**_difference(a, b, entries, recipe), "measure": measure} for a, b in pairs]
    return {
        "measure": measure,
        "measures": measures,
        "groups": {name: [str(runs[i].path) for i in members] for name, members in groups.items()},
        "systems": [_system(label, entry, measures, recipe) for label, entry in entries.items()],
        "comparisons": statistics.with_holm(
            row for row in rows if len(groups) == 1 or any(row["ci"])
        ),
    }


def read_summary(run: Run, evaluation: str | None = None) -> dict[str, Any]:
    """Read the summary.json of an evaluation; RunError if there is none."""
    path = run.eval / (evaluation or "") / "summary.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        named = " or ".join(sorted(file.parent.name for file in run.eval.glob("*/summary.json")))
        advice = (
            f"choose --evaluation {named}" if named else f"run `leret eval RECIPE --run {run.path}`"
        )
        raise RunError(f"{path} cannot be read; {advice}") from error


def _groups(runs: Sequence[Run]) -> dict[str, list[int]]:
    """Map the name of each group, that of its first run, to the positions of its runs."""
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        training = {name: facts.get("recipe") for name, facts in run.manifest.training.items()}
        keys = flat(
            {"sampling": run.section("sampling", "leret sample RECIPE"), "training": training}
        )
        recipe = {key: value for key, value in keys if not key.endswith(".seed")}
        text = json.dumps(recipe, sort_keys=True).replace(str(run.path.resolve()), "")
        groups.setdefault(text, []).append(i)
    names = [run.path.resolve().name for run in runs]
    unique = len(set(names)) == len(names)
    return {
        names[members[0]] if unique else str(runs[members[0]].path): members
        for members in groups.values()
    }


def _refuse_differences(runs: Sequence[Run], summaries: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ConfigError with each difference in data, corpus, split and k."""
    first, *others = [_facts(run, summary) for run, summary in zip(runs, summaries, strict=True)]
    problems = [
        f"{key} is {first.get(key)!r} in {runs[0].path} but {its.get(key)!r} in {run.path}; compare runs that agree"
        for run, summary, its in zip(runs[1:], summaries[1:], others, strict=True)
        for key in sorted(first.keys() | its.keys())
        if its.get(key) != first.get(key)
        and not (key.startswith("data.") and summary["data"] == summaries[0]["data"])
    ]
    if problems:
        raise ConfigError(problems)


def _facts(run: Run, summary: Mapping[str, Any]) -> dict[str, Any]:
    sampling = run.manifest.sampling or {}
    data = {key: value for key, value in sampling["data"].items() if key not in _FREE}
    corpus = "generated" if data["kind"] in GENERATED else run.manifest.digests.get("corpus")
    facts = {
        "retriever.k": sampling["retriever"]["k"],
        "split": summary.get("split"),
        "corpus": corpus,
    }
    return dict(flat(facts | {"data": data}))


def _label(groups: Mapping[str, Any], group: str, system: str | None) -> str:
    return f"{system}" if len(groups) == 1 else f"{group}: {system}"


def _pairs(
    groups: Mapping[str, Sequence[int]], summaries: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield pairs of labels; some may lack scores."""
    (first, (base, *_)), *others = groups.items()
    kinds = {row["system"]: _ORDER.index(row["kind"]) for row in summaries[base]["rows"]}
    if not others:
        for pair in sorted(summaries[base]["comparisons"], key=lambda pair: kinds[pair["a"]]):
            yield pair["a"], pair["b"]
    for group, (i, *_) in others:
        yield (
            _label(groups, group, summaries[i].get("focus")),
            _label(groups, first, summaries[base].get("focus")),
        )
        for system in sorted(kinds, key=kinds.__getitem__):
            yield _label(groups, group, system), _label(groups, first, system)


def _scores(run: Run, summary: Mapping[str, Any], measures: Sequence[str]) -> dict[str, _Scores]:
    """Read the scores of every system of an evaluation."""
    corpus, scores = run.manifest.digests.get("corpus"), {}
    for system, best in ((row["system"], bool(row.get("best_of"))) for row in summary["rows"]):
        rows = read_rows(run.eval / (summary.get("name") or "") / system / "per_question.parquet")
        tasks = [Task(name, {}) for name in dict.fromkeys(row.question_id for row in rows)]
        values = score_table(rows, tasks, summary["n_hops"], measures, best=best).values[:, -1]
        scores[system] = {
            (corpus, task.id): value for task, value in zip(tasks, values, strict=True)
        }
    return scores


def _means(entry: Sequence[_Scores]) -> _Scores:
    """Average over runs; NaN if a run of a question failed."""
    questions = dict.fromkeys(question for scores in entry for question in scores)
    return {q: np.mean([scores[q] for scores in entry if q in scores], axis=0) for q in questions}


def _difference(
    a: str, b: str, entries: Mapping[str, Sequence[_Scores]], recipe: EvalRecipe
) -> dict[str, Any]:
    """Compute the difference of the first measure, without ``p_holm``."""
    ours, theirs = _means(entries[a]), _means(entries[b])
    common = [question for question in ours if question in theirs]
    if not common:
        raise ConfigError(
            f"{a} and {b} have no questions in common; compare runs with the same data.seed"
        )
    x, y = (np.array([scores[question][0] for question in common]) for scores in (ours, theirs))
    [row] = statistics.compare([(a, b)], {a: x[:, None, None], b: y[:, None, None]}, [""], recipe)
    del row["hop"]
    return row | statistics.effect(x - y, recipe.confidence)


def _system(
    label: str, entry: Sequence[_Scores], measures: Sequence[str], recipe: EvalRecipe
) -> dict[str, Any]:
    """Return the means over questions with intervals, and the means of each run."""
    values = np.array(list(_means(entry).values()))
    by_run = [statistics.nan_mean(np.array(list(scores.values()))) for scores in entry]
    bounds = statistics.bootstrap_intervals(
        values, recipe.resamples, recipe.confidence, recipe.seed
    )
    row: dict[str, Any] = {
        "system": label,
        "runs": len(entry),
        "n": int((~np.isnan(values[:, 0])).sum()),
    }
    for i, (measure, mean) in enumerate(zip(measures, statistics.nan_mean(values), strict=True)):
        row |= {
            measure: statistics.json_number(mean),
            f"{measure}_ci": list(map(statistics.json_number, bounds[i])),
        }
        row[f"{measure}_by_run"] = [statistics.json_number(means[i]) for means in by_run]
    return row


def tables(result: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, columns and rows of the tables of systems and of differences."""
    measure, several = result["measure"], any(row["runs"] > 1 for row in result["systems"])
    shown = list(dict.fromkeys([measure, *main_measures(result["measures"])]))
    columns = [
        "system",
        *(LABELS.get(name, name) for name in shown),
        *["by run"] * several,
        "questions",
    ]
    rows = []
    for row in result["systems"]:
        figures = [format_figure(row, name, with_interval=name == measure) for name in shown]
        runs = ", ".join(
            "-" if value is None else f"{value:.3f}" for value in row[f"{measure}_by_run"]
        )
        rows.append([row["system"], *figures, *[runs] * several, f"{row['n']:,}"])
    heads = ["systems", "difference", "p (Holm)", "effect size", "detectable", "questions"]
    lines = []
    for row in result["comparisons"]:
        difference = format_figure(
            {"x": row["difference"], "x_ci": row["ci"]}, "x", with_interval=True
        )
        digits = {"p_holm": 4, "effect_size": 2, "detectable": 3}
        figures = ["-" if row[name] is None else f"{row[name]:.{n}f}" for name, n in digits.items()]
        lines.append([f"{row['a']} - {row['b']}", difference, *figures, f"{row['n']:,}"])
    differences = (f"differences in {LABELS.get(measure, measure)}", heads, lines)
    return [("after the last hop", columns, rows), *[differences] * bool(lines)]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines
    )


def latex(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a LaTeX table for the package booktabs."""
    named = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    escaped = str.maketrans(named | {char: f"\\{char}" for char in "&%$#_{}"})
    head, *lines = (
        " & ".join(cell.translate(escaped) for cell in line) + r" \\" for line in (columns, *rows)
    )
    start = rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}"
    return "\n".join(
        [start, r"\toprule", head, r"\midrule", *lines, r"\bottomrule", r"\end{tabular}"]
    )


FORMS = {"markdown": markdown, "latex": latex}
"""Formats of tables for papers and pages, by name."""
