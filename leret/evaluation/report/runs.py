"""List of runs in a directory, for `leret runs`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leret.core.errors import LeretError, RunError
from leret.core.runs import Run
from leret.evaluation.measures import LABELS
from leret.evaluation.report.comparison import read_summary
from leret.evaluation.summary import main_measure
from leret.evaluation.systems import training_facts


def list_runs(directory: Path) -> list[dict[str, Any]]:
    """Return the facts of each run in a directory and its subdirectories, by path; RunError if there are none."""
    listed = []
    for root, folders, files in os.walk(directory):
        folders.sort()
        if "run.yaml" in files:
            folders.clear()
            try:
                listed.append({"run": root, **_facts(Run.open(Path(root)))})
            except (LeretError, ValueError, KeyError) as error:
                listed.append({"run": root, "state": "unreadable", "error": str(error)})
    if not listed:
        raise RunError(
            f"{directory} has no runs; name the directory of your runs, as in `leret runs runs`"
        )
    return listed


def _facts(run: Run) -> dict[str, Any]:
    sampling, trained, done = (
        run.manifest.sampling or {},
        training_facts(run),
        run.path / "sample.done",
    )
    sampled = json.loads(done.read_text(encoding="utf-8"))["report"] if done.is_file() else None
    summary = read_summary(run) if (run.eval / "summary.json").is_file() else None
    evaluated = [row["system"] for row in summary["rows"]] if summary else []
    started = [
        path.name
        for path in sorted(run.policies.glob("[!.]*"))
        if path.is_dir() and path.name not in trained
    ]
    waiting = [name for name in trained if name not in evaluated]
    states = {
        "sampling unfinished": sampled is None,
        f"training unfinished: {', '.join(started)}": started,
        "sampled": not trained and not summary,
        f"not evaluated: {', '.join(waiting)}": waiting,
    }
    return {
        "state": next((state for state, applies in states.items() if applies), "evaluated"),
        "data": sampling.get("data", {}).get("kind"),
        "sampled": {name: sampled[name] for name in ("policy", "questions", "samples")}
        if sampled
        else None,
        "trained": {name: facts.get("algorithm") for name, facts in trained.items()},
        "evaluated": evaluated,
        "figures": _figures(summary) if summary else {},
    }


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the main measure, and its value for the delivered policy and the baseline after the last hop."""
    measure = main_measure(summary["measures"])
    values = {row["system"]: row["hops"][-1][measure] for row in summary["rows"]}
    names = [name for name in (summary.get("focus"), summary["baseline"]) if name in values]
    return {"measure": measure, "systems": {name: values[name] for name in names}}


def table(listed: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return columns, the most important first (a narrow terminal cuts the last), and a row per run."""
    rows = []
    for run in listed:
        sampled, figures = run.get("sampled") or {}, run.get("figures") or {"systems": {}}
        counts = (
            f"{sampled['questions']:,} questions, {sampled['samples']:,} samples"
            if sampled
            else "-"
        )
        values = [
            f"{name} {'-' if v is None else format(v, '.3f')}"
            for name, v in figures["systems"].items()
        ]
        trained = ", ".join(run.get("trained") or ()) or "-"
        result = (
            f"{LABELS.get(figures['measure'], figures['measure'])}: {', '.join(values)}"
            if values
            else "-"
        )
        rows.append([run["run"], result, run["state"], counts, trained, run.get("data") or "-"])
    return ["run", "main figures", "state", "sampled", "trained", "data"], rows
