"""One evaluation at several lengths of the tasks (kind babilong): sweep.json, sweep.svg, and the console's table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from leret.core.files import write_atomically
from leret.evaluation.measures import LABELS
from leret.evaluation.report.plots import Panel, curves
from leret.evaluation.summary import format_figure, main_measures

_COLOURS: Final = {
    **{"--ink": "#1d2126", "--muted": "#646d76", "--grid": "#e5e3dc", "--card": "#ffffff", "--s-baseline": "#949ba2"},
    **{"--s-base": "#4a6ca8", "--s-prompt": "#bd8a25", "--s-policy": "#0b7a65", "--s-second": "#a9507a"},
    "--font": "sans-serif",
}
"""Values for the CSS variables of the report's page, which this picture stands apart from."""


def write_sweep(directory: Path, summaries: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], Path, Path]:
    """Write the results of all lengths; return the content of sweep.json, its path, and that of the plot."""
    sweep = _sweep(summaries)
    path, plot = directory / "sweep.json", directory / "sweep.svg"
    write_atomically(path, json.dumps(sweep, ensure_ascii=False, indent=1) + "\n")
    write_atomically(plot, _plot(sweep))
    return sweep, path, plot


def _sweep(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    points: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for summary in summaries:
        for row in summary["rows"]:
            points[row["system"]].append({"sentences": summary["sentences"], **row["hops"][-1]})
    return {
        "schema": 1,
        "measures": summaries[0]["measures"],
        "lengths": [summary["sentences"] for summary in summaries],
        "n_questions": [summary["n_questions"] for summary in summaries],
        "rows": [
            {"system": row["system"], "kind": row["kind"], "points": points[row["system"]]}
            for row in summaries[0]["rows"]
        ],
    }


def sweep_table(sweep: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns of the console's table, one per length, and a row per system."""
    measure = main_measures(sweep["measures"])[0]
    columns = [f"{LABELS.get(measure, measure)} at", *map(str, sweep["lengths"])]
    return columns, [
        [row["system"], *(format_figure(point, measure, with_interval=True) for point in row["points"])]
        for row in sweep["rows"]
    ]


def _plot(sweep: Mapping[str, Any]) -> str:
    panels: list[Panel] = []
    for measure in sweep["measures"]:
        lines = {
            row["system"]: [(p["sentences"], p[measure]) for p in row["points"] if p[measure] is not None]
            for row in sweep["rows"]
        }
        if lines := {name: line for name, line in lines.items() if line}:
            panels.append((LABELS.get(measure, measure), lines))
    svg = curves("sweep", "Measures by the sentences of a task", panels, sweep["lengths"])
    for variable, colour in _COLOURS.items():
        svg = svg.replace(f"var({variable})", colour)
    return svg + "\n"
