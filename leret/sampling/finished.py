"""Whether a run has all that a recipe asks for, told without opening a model, a corpus or an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leret.config import SamplingRecipe
from leret.runs import Run
from leret.types import digest

__all__ = ["finished", "mark_finished"]


def finished(run: Run, recipe: SamplingRecipe) -> dict[str, Any] | None:
    """The report of the call that finished this recipe on this run, as long as the files it names are the same.

    Pairs that `leret pairs` has made since stay: they were asked for.
    """
    mark = run.manifest().get("sampled")
    there = run.store.is_file() and (run.preferences / "train.parquet").is_file()
    if not there or not isinstance(mark, Mapping) or mark.get("key") != _key(recipe):
        return None
    return dict(mark["report"])


def mark_finished(run: Run, recipe: SamplingRecipe, report: Mapping[str, Any]) -> None:
    """Remember that nothing is left, unless questions wait for a resume."""
    outages = any(report["failures"].get(kind) for kind in ("policy", "retrieval", "program"))
    key = None if report["waiting"] or outages else _key(recipe)
    run.update(sampled={"key": key, "report": dict(report)})


def _key(recipe: SamplingRecipe) -> str:
    named = [
        recipe.data.corpus,
        recipe.data.questions,
        recipe.program.path.rpartition(":")[0],
        recipe.sampling.bank.path,
    ]
    if recipe.policy.kind == "local":
        named.append(recipe.policy.model)
    return digest(recipe.model_dump(mode="json"), [list(_stats(name)) for name in named if name])


def _stats(name: str) -> Iterator[tuple[str, int, int]]:
    """Names, sizes and times of a file, or of the files of a directory."""
    path = Path(name)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            stat = file.stat()
            yield file.name, stat.st_size, stat.st_mtime_ns
