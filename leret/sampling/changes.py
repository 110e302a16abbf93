"""Whether a recipe may go on with a run that another one began."""

from __future__ import annotations

from collections.abc import Mapping

from leret.config.base import free_keys, paths_in
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.core.stages import check_resumable, input_stamps
from leret.core.types import Json
from leret.sampling.rollouts.environment import Environment, questions_digest

_FREE = free_keys(SamplingRecipe)
"""May change: what decides no sample, what a digest stands for (files), and the policy (another round)."""


def refuse_changes(run: Run, recipe: SamplingRecipe, digests: Mapping[str, str]) -> None:
    """Refuse to mix samples of two recipes in one run.

    Args:
        run: new, or sampled before.
        recipe: with paths that can be opened from here.
        digests: of the files that it names, by name; those that the run does not know are not compared.

    Raises:
        RunError: something that decides a sample has changed; every such key is listed.
    """
    manifest = run.manifest()
    before = manifest.get("sampling")
    if before is not None:
        known = {name: value for name, value in manifest.get("digests", {}).items() if name in digests}
        now = {**recipe.model_dump(mode="json"), "digest": {name: digests[name] for name in known}}
        check_resumable(run.path, {**before, "digest": known}, now, _FREE)


def refuse_changed_files(run: Run, bench: Environment) -> None:
    """Refuse a program, a corpus, or questions, that are not those of the sampling; of a new run, nothing."""
    before = run.manifest().get("sampling")
    if before is None:
        return
    refuse_changes(run, bench.recipe, {"program": bench.program_digest, "corpus": bench.corpus.digest})
    sampled = bench.questions(limit=before["data"]["limit"])
    refuse_changes(run, bench.recipe, {"questions": questions_digest([q for q in sampled if q.gold])})


def recipe_stamps(recipe: SamplingRecipe) -> Json:
    """Stamps of the files that a recipe names."""
    return input_stamps(*(path for _, path, _ in paths_in(recipe)))
