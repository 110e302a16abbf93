"""List of runs in a directory, for `leret compare`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leret.config.evaluation import main_measure
from leret.core.errors import LeretError, RunError
from leret.core.runs import Run
from leret.evaluation.measures import LABELS
from leret.evaluation.report.comparison import read_summary
from leret.evaluation.summary import Summary


def list_runs(directory: Path) -> list[dict[str, Any]]:
    """Return the state of each run in a directory and its subdirectories, by path.

    RunError if there are none.
    """
    listed = []
    for root, folders, files in os.walk(directory):
        folders.sort()
        if "run.yaml" in files:
            folders.clear()
            try:
                listed.append({"run": root, **_state(Run.open(Path(root)))})
            except (LeretError, ValueError, KeyError) as error:
                listed.append({"run": root, "state": "unreadable", "error": str(error)})
    if not listed:
        raise RunError(
            f"{directory} is neither a run nor a directory with runs; name one, as in "
            "`leret compare DIR`"
        )
    return listed


def _state(run: Run) -> dict[str, Any]:
    """Return the last finished stage of a run, and what it has sampled, trained and evaluated."""
    trained = run.trainings()
    sampled = None
    done = run.path / "sample.done"
    if done.is_file():
        report = json.loads(done.read_text(encoding="utf-8"))["report"]
        sampled = {name: report[name] for name in ("policy", "questions", "samples")}
    evaluated: list[str] = []
    figures: dict[str, Any] = {}
    has_summary = (run.eval / "summary.json").is_file()
    if has_summary:
        summary = read_summary(run)
        evaluated = [row["system"] for row in summary["rows"]]
        figures = _figures(summary)
    started = []
    for path in sorted(run.policies.glob("[!.]*")):
        if path.is_dir() and path.name not in trained:
            started.append(path.name)
    waiting = [name for name in trained if name not in evaluated]
    state = "evaluated"
    if sampled is None:
        state = "sampling unfinished"
    elif started:
        state = f"training unfinished: {', '.join(started)}"
    elif not trained and not has_summary:
        state = "sampled"
    elif waiting:
        state = f"not evaluated: {', '.join(waiting)}"
    return {
        "state": state,
        "data": (run.manifest.sampling or {}).get("data", {}).get("kind"),
        "sampled": sampled,
        "trained": {name: note.get("algorithm") for name, note in trained.items()},
        "evaluated": evaluated,
        "figures": figures,
    }


def _figures(summary: Summary) -> dict[str, Any]:
    """Return the main measure, and its last value for the delivered policy and the baseline."""
    measure = main_measure(summary["measures"])
    values = {row["system"]: row["hops"][-1][measure] for row in summary["rows"]}
    names = [name for name in (summary.get("focus"), summary["baseline"]) if name in values]
    return {"measure": measure, "systems": {name: values[name] for name in names}}


def table(listed: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return columns, the most important first, and a row per run.

    A narrow terminal cuts the last columns.
    """
    rows = []
    for run in listed:
        sampled = run.get("sampled")
        counts = "-"
        if sampled:
            counts = f"{sampled['questions']:,} questions, {sampled['samples']:,} samples"
        figures = run.get("figures") or {"systems": {}}
        values = []
        for name, value in figures["systems"].items():
            values.append(f"{name} -" if value is None else f"{name} {value:.3f}")
        result = "-"
        if values:
            label = LABELS.get(figures["measure"], figures["measure"])
            result = f"{label}: {', '.join(values)}"
        trained = ", ".join(run.get("trained") or ()) or "-"
        rows.append([run["run"], result, run["state"], counts, trained, run.get("data") or "-"])
    return ["run", "main figures", "state", "sampled", "trained", "data"], rows
