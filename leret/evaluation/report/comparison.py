"""Comparison of evaluated runs, for `leret compare`.

Runs with equal recipes, except for seeds, form a group. The scores of a question are averaged over
the runs of a group before the tests. So intervals and p-values are about questions, for these
trainings; the means by run show how much the trainings differ. In one group, systems are compared
in the pairs of its evaluation. Otherwise each system is compared with the same system of the first
group, and the delivered policy with the delivered policy. Differences are paired, on the questions
that both sides have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from leret.config.data import GENERATED
from leret.config.evaluation import label, main_measure
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.core.stages import flat
from leret.core.types import Task
from leret.evaluation import statistics
from leret.evaluation.measures import LABELS
from leret.evaluation.results import read_rows
from leret.evaluation.summary import (
    Summary,
    format_figure,
    main_measures,
    score_table,
)
from leret.evaluation.systems import completions_used
from leret.rewards.corpus import CORPUS

_Scores = dict[tuple[str | None, str], statistics.Array]
"""Measures after the last hop by corpus digest and question id.

Each generated world has its own questions.
"""

_ORDER = ("policy", "prompt", "base", "baseline")
"""Kinds of systems in the order of their differences."""

WORDS = (
    "effect size: the mean difference divided by its standard deviation over questions "
    "(0.2 is small, 0.8 large); "
    "detectable: the smallest difference that this number of questions shows in four of five tests"
)

_FREE = {"seed", "limit", "part", "split", "skip_invalid"}
"""Keys of data that change neither documents nor labels."""


def compare_runs(
    runs: Sequence[Run], measure: str | None = None, evaluation: str | None = None
) -> dict[str, Any]:
    """Compare systems by a measure, by default the main one.

    Returns:
        ``measure``, ``measures``, ``groups`` (paths by name), and the rows of `tables`:
        ``systems``, ``comparisons``, ``completions`` (those that each run used).

    Raises:
        RunError: a run is not evaluated.
        ConfigError: data, corpus, split or k differ, or the runs do not share the measure or any
            question.
    """
    summaries = [read_summary(run, evaluation) for run in runs]
    groups = _groups(runs)
    _refuse_differences(runs, summaries)
    measures = _shared_measures(summaries)
    if not measures:
        raise ConfigError("the runs share no measure that is a mean over questions")
    if measure is not None and measure not in measures:
        raise ConfigError(
            f"--measure: {measure!r} is not a mean over questions in every run; "
            f"available: {', '.join(measures)}"
        )
    measure = measure or main_measure(measures)
    measures.remove(measure)
    measures.insert(0, measure)
    scores = _scores_by_label(runs, summaries, groups, measures)
    resampling = _resampling(summaries[0])
    rows = []
    for a, b in dict.fromkeys(_pairs(groups, summaries)):
        if a in scores and b in scores:
            row = {**_difference(a, b, scores, resampling), "measure": measure}
            # Leave out equal systems (their interval is 0 to 0) and systems without scores.
            if len(groups) == 1 or any(row["ci"]):
                rows.append(row)
    systems = [_system(name, values, measures, resampling) for name, values in scores.items()]
    paths = {}
    for name, members in groups.items():
        paths[name] = [str(runs[i].path) for i in members]
    return {
        "measure": measure,
        "measures": measures,
        "groups": paths,
        "systems": systems,
        "comparisons": statistics.with_holm(rows),
        "completions": {str(run.path): completions_used(run) for run in runs},
    }


def _shared_measures(summaries: Sequence[Summary]) -> list[str]:
    """Return the measures of all evaluations that are means over questions."""
    measures = []
    for measure in summaries[0]["measures"]:
        if measure not in CORPUS and all(measure in summary["measures"] for summary in summaries):
            measures.append(measure)
    return measures


def _scores_by_label(
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    groups: Mapping[str, Sequence[int]],
    measures: Sequence[str],
) -> dict[str, list[_Scores]]:
    """Map the label of each system that all runs of its group have to its scores by run."""
    scores = [_scores(run, summary, measures) for run, summary in zip(runs, summaries, strict=True)]
    by_label = {}
    for group, members in groups.items():
        for system in scores[members[0]]:
            if all(system in scores[i] for i in members):
                by_label[_label(groups, group, system)] = [scores[i][system] for i in members]
    return by_label


def every_difference(run: Run, summary: Summary) -> list[dict[str, Any]]:
    """Compare each system with each other one by the main measure, after the last hop.

    A measure of all answers together is compared only in the pairs of the summary.
    """
    measure = main_measure(summary["measures"])
    if measure in CORPUS:
        return [pair for pair in summary["comparisons"] if pair["measure"] == measure]
    scores = _scores(run, summary, [measure])
    questions: _Scores = {}
    for table in scores.values():
        questions |= table
    missing = np.full(1, np.nan)
    values = {}
    for system, table in scores.items():
        rows = [table.get(question, missing) for question in questions]
        values[system] = np.array(rows)[:, None]
    pairs = list(permutations(values, 2))
    return statistics.compare(pairs, values, [measure], _resampling(summary))


def _resampling(summary: Summary) -> statistics.Resampling:
    return statistics.Resampling(summary["resamples"], summary["confidence"], summary["seed"])


def read_summary(run: Run, evaluation: str | None = None) -> dict[str, Any]:
    """Return the summary.json of an evaluation; RunError if there is none."""
    summaries = run.summaries()
    name = evaluation or ""
    if name not in summaries:
        advice = f"run `leret eval RECIPE --run {run.path}`"
        names = list(filter(None, summaries))
        if names:
            advice = f"choose --evaluation {' or '.join(names)}"
        raise RunError(f"{run.eval / name / 'summary.json'} does not exist; {advice}")
    return summaries[name]


def _groups(runs: Sequence[Run]) -> dict[str, list[int]]:
    """Map the name of each group, that of its first run, to the positions of its runs."""
    by_recipe: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        sampling = run.sampling()
        training = {name: note.get("recipe") for name, note in run.manifest.training.items()}
        keys = flat({"sampling": sampling, "training": training})
        recipe = {key: value for key, value in keys if not key.endswith(".seed")}
        text = json.dumps(recipe, sort_keys=True).replace(str(run.path.resolve()), "")
        by_recipe.setdefault(text, []).append(i)
    names = [run.path.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    return {names[members[0]]: members for members in by_recipe.values()}


def _refuse_differences(runs: Sequence[Run], summaries: Sequence[Summary]) -> None:
    """Raise a ConfigError with each difference in data, corpus, split and k."""
    first = _setting(runs[0], summaries[0])
    problems = []
    for run, summary in zip(runs[1:], summaries[1:], strict=True):
        setting = _setting(run, summary)
        same_data = summary["data"] == summaries[0]["data"]
        for key in sorted(first.keys() | setting.keys()):
            a, b = first.get(key), setting.get(key)
            if a != b and not (same_data and key.startswith("data.")):
                problems.append(
                    f"{key} is {a!r} in {runs[0].path} but {b!r} in {run.path}; "
                    "compare runs that agree"
                )
    if problems:
        raise ConfigError(problems)


def _setting(run: Run, summary: Summary) -> dict[str, Any]:
    """Return by dotted key what must be equal in compared runs."""
    sampling = run.manifest.sampling or {}
    data = {key: value for key, value in sampling["data"].items() if key not in _FREE}
    corpus = "generated" if data["kind"] in GENERATED else run.manifest.digests.get("corpus")
    setting = {
        "retriever.k": sampling["retriever"]["k"],
        "split": summary.get("split"),
        "corpus": corpus,
        "data": data,
    }
    return dict(flat(setting))


def _label(groups: Mapping[str, Any], group: str, system: str) -> str:
    return system if len(groups) == 1 else f"{group}: {system}"


def _pairs(
    groups: Mapping[str, Sequence[int]], summaries: Sequence[Summary]
) -> Iterator[tuple[str, str]]:
    """Yield pairs of labels; some may lack scores."""
    first, *later = groups
    base = summaries[groups[first][0]]
    base_focus = base.get("focus")
    kinds = {row["system"]: _ORDER.index(row["kind"]) for row in base["rows"]}
    if not later:
        for pair in sorted(base["comparisons"], key=lambda pair: kinds[pair["a"]]):
            yield pair["a"], pair["b"]
    for group in later:
        focus = summaries[groups[group][0]].get("focus")
        if focus and base_focus:
            yield _label(groups, group, focus), _label(groups, first, base_focus)
        for system in sorted(kinds, key=kinds.__getitem__):
            yield _label(groups, group, system), _label(groups, first, system)


def _scores(run: Run, summary: Summary, measures: Sequence[str]) -> dict[str, _Scores]:
    """Read the scores of every system of an evaluation."""
    corpus = run.manifest.digests.get("corpus")
    directory = run.eval / (summary.get("name") or "")
    scores: dict[str, _Scores] = {}
    for row in summary["rows"]:
        system = row["system"]
        hops = read_rows(directory / system / "per_question.parquet")
        names = dict.fromkeys(hop.question_id for hop in hops)
        tasks = [Task(name, {}) for name in names]
        table = score_table(hops, tasks, summary["n_hops"], measures)
        scores[system] = {}
        for task, values in zip(tasks, table.values[:, -1], strict=True):
            scores[system][corpus, task.id] = values
    return scores


def _means(runs: Sequence[_Scores]) -> _Scores:
    """Average over runs; NaN if a run of a question failed."""
    by_question: dict[tuple[str | None, str], list[statistics.Array]] = {}
    for scores in runs:
        for question, values in scores.items():
            by_question.setdefault(question, []).append(values)
    return {question: np.mean(values, axis=0) for question, values in by_question.items()}


def _difference(
    a: str, b: str, scores: Mapping[str, Sequence[_Scores]], resampling: statistics.Resampling
) -> dict[str, Any]:
    """Compute the difference of the first measure, without ``p_holm``."""
    a_means = _means(scores[a])
    b_means = _means(scores[b])
    common = [question for question in a_means if question in b_means]
    if not common:
        raise ConfigError(
            f"{a} and {b} have no questions in common; compare runs with the same data.seed"
        )
    x = np.array([a_means[question][0] for question in common])
    y = np.array([b_means[question][0] for question in common])
    values = {a: x[:, None, None], b: y[:, None, None]}
    [row] = statistics.compare([(a, b)], values, [""], resampling)
    del row["hop"]
    return row | statistics.effect(x - y, resampling.confidence)


def _system(
    name: str, runs: Sequence[_Scores], measures: Sequence[str], resampling: statistics.Resampling
) -> dict[str, Any]:
    """Return the means over questions with intervals, and the means of each run."""
    values = np.array(list(_means(runs).values()))
    overall = statistics.nan_mean(values)
    means_by_run = [statistics.nan_mean(np.array(list(scores.values()))) for scores in runs]
    bounds = statistics.bootstrap_intervals(values, *resampling)
    n = int((~np.isnan(values[:, 0])).sum())
    row: dict[str, Any] = {"system": name, "runs": len(runs), "n": n}
    for i, measure in enumerate(measures):
        row[measure] = statistics.json_number(overall[i])
        row[f"{measure}_ci"] = [statistics.json_number(bound) for bound in bounds[i]]
        row[f"{measure}_by_run"] = [statistics.json_number(means[i]) for means in means_by_run]
    return row


def tables(result: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, columns and rows of the tables of systems and of differences."""
    all_tables = [_table_of_systems(result)]
    if result["comparisons"]:
        all_tables.append(_table_of_differences(result))
    if any(result["completions"].values()):
        all_tables.append(_table_of_completions(result))
    return all_tables


def _table_of_systems(result: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    measure = result["measure"]
    measures = list(dict.fromkeys([measure, *main_measures(result["measures"])]))
    several = any(row["runs"] > 1 for row in result["systems"])
    columns = ["system", *(LABELS.get(name, name) for name in measures)]
    if several:
        columns.append("by run")
    columns.append("questions")
    rows = []
    for row in result["systems"]:
        cells = [label(row["system"])]
        for name in measures:
            cells.append(format_figure(row, name, with_interval=name == measure))
        if several:
            cells.append(", ".join(_rounded(value, 3) for value in row[f"{measure}_by_run"]))
        cells.append(f"{row['n']:,}")
        rows.append(cells)
    return "after the last hop", columns, rows


def _table_of_differences(result: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    columns = ["systems", "difference", "p (Holm)", "effect size", "detectable", "questions"]
    rows = []
    for row in result["comparisons"]:
        figures = {"x": row["difference"], "x_ci": row["ci"]}
        cells = [
            label(f"{row['a']} - {row['b']}"),
            format_figure(figures, "x", with_interval=True),
            _rounded(row["p_holm"], 4),
            _rounded(row["effect_size"], 2),
            _rounded(row["detectable"], 3),
            f"{row['n']:,}",
        ]
        rows.append(cells)
    measure = result["measure"]
    return f"differences in {LABELS.get(measure, measure)}", columns, rows


def _table_of_completions(result: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    rows = []
    for path, used in result["completions"].items():
        counts = ", ".join(f"{name} {n:,}" for name, n in used.items())
        rows.append([path, counts or "-"])
    return "completions that each run used", ["run", "completions"], rows


def _rounded(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    alignment = ["---", *["---:"] * (len(columns) - 1)]
    lines = []
    for row in (columns, alignment, *rows):
        cells = [cell.replace("|", "&#124;") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def latex(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a LaTeX table for the package booktabs."""
    escapes = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    for char in "&%$#_{}":
        escapes[char] = f"\\{char}"
    escaped = str.maketrans(escapes)
    lines = []
    for row in (columns, *rows):
        cells = [cell.translate(escaped) for cell in row]
        lines.append(" & ".join(cells) + r" \\")
    alignment = "l" + "r" * (len(columns) - 1)
    lines.insert(1, r"\midrule")
    start = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
    return "\n".join([*start, *lines, r"\bottomrule", r"\end{tabular}"])


FORMS = {"markdown": markdown, "latex": latex}
"""Formats of tables for papers and pages, by name."""
