"""`leret sample --merge`: merge the samples of shards into a run's store."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path

from leret.config.load import sampling_recipe_of
from leret.core.errors import RunError
from leret.core.runs import Run
from leret.programs.prompts import Prompt
from leret.rollouts.environment import refuse_changes
from leret.sampling.store.store import Store


def merge_shards(
    run: Run, shards: Iterable[Path] = (), store: Store | None = None
) -> dict[str, int]:
    """Merge R/shards/*.db and the runs ``shards`` into a run's store, and delete R/shards/*.db.

    Return the new `Store.counts`. ``store`` is the run's store if it is already open.
    """
    stores: list[Path] = []
    for shard in map(Run.open, shards):
        recipe = sampling_recipe_of(shard, "leret sample RECIPE --shard I/N")
        refuse_changes(run, recipe, shard.manifest.digests)
        if _prompts(shard) != _prompts(run):
            raise RunError(
                f"{shard.path}/prompts and {run.path}/prompts differ; "
                "merge only runs with the same prompts"
            )
        stores += [shard.store, *shard_stores(shard)]
    with nullcontext(store) if store is not None else Store(run.store) as target:
        for path in stores:
            if path.is_file():
                target.merge(path)
        for path in shard_stores(run):
            with Store(path):  # raises if the shard is in use
                target.merge(path)
            for suffix in ("", "-wal", "-shm", ".lock"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
        with suppress(OSError):  # missing, or not empty because a shard has started
            run.shards.rmdir()
        return target.counts()


def _prompts(run: Run) -> dict[str, str]:
    return {path.stem: Prompt.load(path).digest for path in run.prompts.glob("*.json")}


def shard_stores(run: Run) -> list[Path]:
    """Return the shard stores that are not merged yet."""
    return sorted(run.shards.glob("*.db"))
