"""Whether a run has all that a recipe asks for, told without opening a model, a corpus or an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leret.core.runs import Run
from leret.core.types import digest


def finished(run: Run, recipe: Any) -> dict[str, Any] | None:
    """The report of the call that finished this recipe on this run, as long as the files it names are the same.

    Pairs that `leret pairs` has made since stay: they were asked for.
    """
    mark = run.manifest().get("sampled")
    if not run.store.is_file() or not isinstance(mark, Mapping) or mark.get("key") != _key(recipe):
        return None
    whole = mark.get("bytes") == run.store.stat().st_size and is_whole(run.preferences / "train.parquet")
    return dict(mark["report"]) if whole else None  # the long way refuses a damaged store, and makes the pairs again


def mark_finished(run: Run, recipe: Any, report: Mapping[str, Any]) -> None:
    """Remember that nothing is left, unless questions wait for a resume."""
    outages = any(report["failures"].get(kind) for kind in ("policy", "retrieval", "program"))
    key = None if report["waiting"] or outages else _key(recipe)
    run.update(sampled={"key": key, "report": dict(report), "bytes": run.store.stat().st_size})


def file_stamps(recipe: Any) -> list[list[tuple[str, int, int]]]:
    """Names, sizes and times of the files that a recipe names: as long as they are equal, so is what is in them."""
    named = [
        recipe.data.corpus,
        recipe.data.questions,
        recipe.program.path.rpartition(":")[0],
        recipe.sampling.bank.path,
        recipe.retriever.index,
    ]
    if recipe.policy.kind == "local":
        named.append(recipe.policy.model)
    return [list(stamps(name)) for name in named if name]


def _key(recipe: Any) -> str:
    return digest(recipe.model_dump(mode="json"), file_stamps(recipe))


def is_whole(path: Path) -> bool:
    """Whether a Parquet file is there to its end, where its table of contents is."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.read_metadata(path)
    except (OSError, pa.ArrowException):
        return False
    return True


def stamps(name: str | Path) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of change of a file, or of the files of a directory and of those in it."""
    path = Path(name)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            stat = file.stat()
            yield file.name, stat.st_size, stat.st_mtime_ns
