"""Report an evaluation at several task lengths (kind babilong): sweep.json, sweep.svg, and a table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from leret.core.files import write_atomically
from leret.evaluation.measures import LABELS
from leret.evaluation.summary import format_figure, main_measures


def write_sweep(directory: Path, summaries: Sequence[Mapping[str, Any]]) -> None:
    """Write sweep.json and sweep.svg with each system's measures after the last hop, at each length."""
    points: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for summary in summaries:
        for row in summary["rows"]:
            points[row["system"]].append({"sentences": summary["sentences"], **row["hops"][-1]})
    sweep = {
        "schema": 1,
        "measures": summaries[0]["measures"],
        "lengths": [summary["sentences"] for summary in summaries],
        "n_questions": [summary["n_questions"] for summary in summaries],
        "rows": [
            {**{k: row[k] for k in ("system", "kind")}, "points": points[row["system"]]} for row in summaries[0]["rows"]
        ],
    }
    write_atomically(directory / "sweep.json", json.dumps(sweep, ensure_ascii=False, indent=1) + "\n")
    _plot(sweep, directory / "sweep.svg")


def sweep_table(summaries: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the column names of a table (one per length) and its rows (one per system) for the main measure."""
    measure = main_measures(summaries[0]["measures"])[0]
    columns = [f"{LABELS.get(measure, measure)} at", *(str(summary["sentences"]) for summary in summaries)]
    rows = zip(*(summary["rows"] for summary in summaries), strict=True)
    return columns, [
        [r[0]["system"], *(format_figure(x["hops"][-1], measure, with_interval=True) for x in r)] for r in rows
    ]


def _plot(sweep: Mapping[str, Any], path: Path) -> None:
    with rc_context({"svg.hashsalt": "leret", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(4 * len(sweep["measures"]), 3), layout="constrained")
        for axes, measure in zip(
            figure.subplots(1, len(sweep["measures"]), squeeze=False)[0], sweep["measures"], strict=True
        ):
            for row in sweep["rows"]:
                line = [(p["sentences"], p[measure]) for p in row["points"] if p[measure] is not None]
                if line:
                    axes.plot(*zip(*line, strict=True), "o-", label=row["system"])
            axes.set(title=LABELS.get(measure, measure), xlabel="sentences", xscale="log")
            axes.set_xticks(sweep["lengths"], [f"{n:,}" for n in sweep["lengths"]])
            axes.minorticks_off()
        figure.axes[0].legend()
        figure.savefig(path, metadata={"Date": None})
