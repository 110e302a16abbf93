"""What an evaluation is about, and whether it is done already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leret.config.evaluation import EvalRecipe
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.core.stages import input_stamps, is_complete_parquet
from leret.core.types import digest
from leret.evaluation.evaluator import Policies
from leret.evaluation.measures import all_measures
from leret.evaluation.policies import policies_of
from leret.evaluation.systems import System, available, chosen
from leret.sampling.rollouts.environment import recipe_stamps

_RENAME = "give this evaluation another name: --set evaluation=NAME"


@dataclass(frozen=True)
class Job:
    """An evaluation with its inputs resolved; nothing of it is opened yet.

    Attributes:
        policies: of the run.
        measures: the recipe's, and those that every report shows.
        directory: of the results.
        page: the report.
        data: names the questions of the split, once they are read.
        key: names all that the summary follows from, files by their size and time of change.
    """

    recipe: EvalRecipe
    run: Run
    systems: Sequence[System]
    policies: Policies
    measures: Sequence[str]
    directory: Path
    page: Path
    key: str
    data: str = ""

    @property
    def delivers(self) -> bool:
        """Whether R/program is this one's: of the run's own test questions, or any while there is none of these."""
        return self.directory == self.run.eval or not (self.run.eval / "summary.json").is_file()


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
        input_stamps(run.store, run.preferences / "train.parquet", recipe.questions),
        recipe_stamps(SamplingRecipe.model_validate(sampling)),
    )
    directory = run.eval / (recipe.evaluation_name or "")
    names = [*known, *(system.name for system in systems)]
    shared = [name for name in names if name == recipe.evaluation_name or (directory / name / "summary.json").is_file()]
    if shared:
        raise ConfigError(f"evaluation: {shared[0]!r} is a system and an evaluation of this run; {_RENAME}")
    page = directory / "report.html" if recipe.evaluation_name else run.report
    return Job(recipe, run, systems, policies, all_measures(recipe.measures), directory, page, key)


def finished(job: Job) -> dict[str, Any] | None:
    """The summary of this very evaluation, where all of it is there and nothing failed."""
    summary = _read_summary(job.directory)
    if summary.get("key") != job.key or any(row["failed"] for row in summary["rows"]):
        return None
    folders = [job.directory / system.name for system in job.systems]
    files = [job.page, job.directory / "qrels.trec", *(folder / "evaluated.json" for folder in folders)]
    files += [job.run.program / "policy.json"] if job.delivers else []
    whole = all(f.is_file() for f in files) and all(
        is_complete_parquet(folder / "per_question.parquet") for folder in folders
    )
    return summary if whole else None


def on_data(job: Job, data: str) -> Job:
    """The job with its questions named.

    Raises:
        RunError: the directory holds results on other questions, or decoded otherwise.
    """
    before, temperature, seed = _read_summary(job.directory), job.recipe.temperature, job.recipe.seed
    other = ["other questions or gold documents"] if before.get("data", data) != data else []
    other += [f"temperature {before['temperature']}"] if before.get("temperature", temperature) != temperature else []
    other += [f"seed {before['seed']}"] if temperature > 0 and before.get("seed", seed) != seed else []
    if other:
        raise RunError(f"{job.directory} holds an evaluation of {' and '.join(other)}; {_RENAME}")
    return replace(job, data=data)


def _read_summary(directory: Path) -> dict[str, Any]:
    """summary.json of an evaluation; nothing where it is not there, or cannot be read."""
    try:
        return dict(json.loads((directory / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
