"""Whether a recipe may go on with a run that another one began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from leret.config.base import free_keys
from leret.config.sampling import SamplingRecipe
from leret.core.errors import RunError
from leret.core.runs import Run
from leret.sampling.rollouts.environment import Workbench, questions_digest

_FREE = free_keys(SamplingRecipe)
"""May change: what decides no sample, what a digest stands for (files), and the policy (another round)."""

_FILES = {"corpus": "data.corpus", "questions": "data.questions", "retriever": "retriever", "program": "program.path"}
"""Digests of what the free keys name."""


def refuse_changes(run: Run, recipe: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    """Refuse to mix samples of two recipes in one run.

    Args:
        run: new, or sampled before.
        recipe: resolved, as it would be written into the run.
        digests: of what it names now; of the questions, those under the run's own limit.

    Raises:
        RunError: something that decides a sample has changed; every such key is listed.
    """
    manifest = run.manifest()
    before = manifest.get("sampling")
    if before is None:
        return
    old, new = dict(_flat(before)), dict(_flat(recipe))
    keys = [key for key in dict.fromkeys([*old, *new]) if not any(key == f or key.startswith(f"{f}.") for f in _FREE)]
    changed = [
        f"{key}: {old.get(key)!r} in the run, {new.get(key)!r} in the recipe"
        for key in keys
        if old.get(key) != new.get(key)
    ]
    known = manifest.get("digests", {})
    changed += [
        f"{key}: its content is not the same as when the run began"
        for name, key in _FILES.items()
        if name in digests and known.get(name, digests[name]) != digests[name]
    ]
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise RunError(
            f"{run.path} was sampled from another recipe:\n{listed}\nuse the same values, or name a new run directory"
        )


def refuse_changed_files(run: Run, bench: Workbench) -> None:
    """Refuse a program, a corpus, or questions, that are not those of the sampling; of a new run, nothing.

    Raises:
        RunError: the content of such a file has changed; each is named.
    """
    before = run.manifest().get("sampling")
    if before is None:
        return
    recipe = bench.recipe.model_dump(mode="json")
    refuse_changes(run, recipe, {"program": bench.program_digest, "corpus": bench.corpus.digest})
    sampled = bench.questions(limit=before["data"]["limit"])
    refuse_changes(run, recipe, {"questions": questions_digest([q for q in sampled if q.gold])})


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif value not in ({}, None):
        yield key, list(value) if isinstance(value, tuple) else value
