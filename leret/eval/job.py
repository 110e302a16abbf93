"""What an evaluation is about, and whether it is done already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.config import EvalRecipe
from leret.errors import ConfigError
from leret.eval.evaluator import Policies
from leret.eval.measures import all_measures
from leret.eval.policies import policies_of
from leret.eval.systems import System, available, chosen
from leret.runs import Run
from leret.types import digest

__all__ = ["Job", "finished", "resolve"]


@dataclass(frozen=True)
class Job:
    """An evaluation with its inputs resolved; nothing of it is opened yet.

    Attributes:
        policies: of the run.
        measures: the recipe's, and those that every report shows.
        data: names where the questions come from, however many of them are asked.
        key: names all that the summary follows from.
    """

    recipe: EvalRecipe
    run: Run
    systems: Sequence[System]
    policies: Policies
    measures: Sequence[str]
    data: str
    key: str


def resolve(recipe: EvalRecipe, run: Run) -> Job:
    """Everything that can be known without opening data or models.

    Raises:
        ConfigError: unknown systems, measures or baseline.
        PolicyError: a policy's directory is gone.
        RunError: the run was not sampled, or cannot be read.
    """
    sampling = run.section("sampling", "leret sample RECIPE")
    known = available(run, recipe.demos)
    systems = chosen(recipe.systems, known, tuple(recipe.demos))
    if recipe.baseline not in known:
        raise ConfigError(f"baseline: {recipe.baseline!r} is not in this run; it has {', '.join(known)}")
    policies = policies_of(run)
    key = digest(
        recipe.model_dump(mode="json"),
        sampling,
        run.manifest().get("digests"),
        [[s.name, s.prompt and s.prompt.digest, s.prompt and policies.digest(s)] for s in systems],
        [_stamp(path) for path in (run.store, run.preferences / "train.parquet", Path(recipe.questions or ""))],
    )
    data = digest(
        {**sampling["data"], "split": None, "limit": None}, recipe.questions, _stamp(Path(recipe.questions or ""))
    )
    return Job(recipe, run, systems, policies, all_measures(recipe.measures), data, key)


def finished(job: Job) -> dict[str, Any] | None:
    """The summary of this very evaluation, where all of it is there and nothing failed."""
    run = job.run
    notes = [run.eval / system.name / "evaluated.json" for system in job.systems]
    try:
        summary: dict[str, Any] = json.loads((run.eval / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = summary.get("key") == job.key and run.report.is_file()
    if not whole or not all(note.is_file() for note in notes) or any(row["failed"] for row in summary["rows"]):
        return None
    return summary


def _stamp(path: Path) -> list[int] | None:
    """Size and time of change of a file; None where there is none."""
    if not path.is_file():
        return None
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
