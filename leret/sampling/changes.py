"""Whether a recipe may go on with a run that another one began."""

from __future__ import annotations

from collections.abc import Mapping

from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.core.stages import check_resumable, input_stamps
from leret.core.types import Json
from leret.sampling.rollouts.environment import Workbench, questions_digest

_FREE = (
    "data.corpus",
    "data.questions",
    "data.limit",
    "data.skip_bad",
    "retriever.index",
    "retriever.answers",
    *(f"retriever.remote.{key}" for key in ("urls", "queries_per_request", "requests_per_s", "token_env")),
    *(
        f"retriever.{kind}.{key}"
        for kind in ("remote", "pubmed", "clinicaltrials")
        for key in ("timeout_s", "patience_s", "concurrency", "offline", "api_key_env", "email", "tool")
    ),
    "program.path",
    *(
        f"policy.{key}"
        for key in (
            *("kind", "model", "urls", "api_key_env", "tokenizer", "device", "dtype", "timeout_s", "deadline_s"),
            *("max_retries", "concurrency", "logprobs", "best_of"),
            *("price_prompt", "price_completion"),
        )
    ),
    *(f"sampling.{key}" for key in ("concurrency", "max_error_rate", "max_unparsed_rate")),
    *(f"sampling.{key}" for key in ("strategy", "margin", "max_pairs")),
    "pretrain",
)
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


def refuse_changed_files(run: Run, bench: Workbench) -> None:
    """Refuse a program, a corpus, or questions, that are not those of the sampling; of a new run, nothing."""
    before = run.manifest().get("sampling")
    if before is None:
        return
    refuse_changes(run, bench.recipe, {"program": bench.program_digest, "corpus": bench.corpus.digest})
    sampled = bench.questions(limit=before["data"]["limit"])
    refuse_changes(run, bench.recipe, {"questions": questions_digest([q for q in sampled if q.gold])})


def recipe_stamps(recipe: SamplingRecipe) -> Json:
    """Stamps of the files that a recipe names."""
    return input_stamps(
        recipe.data.corpus,
        recipe.data.questions,
        recipe.program.path.rpartition(":")[0],
        recipe.sampling.bank.path,
        recipe.retriever.index,
        recipe.policy.model if recipe.policy.kind == "local" else None,
    )
