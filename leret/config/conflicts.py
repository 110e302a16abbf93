"""Settings that are each fine and that cannot go together: found before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from leret.config.data import QUESTIONS_ALONE
from leret.config.evaluation import EvalRecipe
from leret.config.sampling import SamplingRecipe
from leret.config.training import TrainingRecipe

Clash = tuple[tuple[str, ...], str]
"""Dotted keys that take part, the one to mend first, and what is wrong with it."""


def clashes(recipe: BaseModel) -> Iterator[Clash]:
    """Every impossible combination of a recipe whose single values are valid."""
    if isinstance(recipe, SamplingRecipe):
        yield from _data(recipe)
        yield from _policy(recipe)
        yield from _sampling(recipe)
    elif isinstance(recipe, TrainingRecipe):
        yield from _training(recipe)
    elif isinstance(recipe, EvalRecipe) and recipe.samples > 1 and recipe.temperature == 0:
        runs = f"at temperature 0 the {recipe.samples} runs of a question are the same; set samples: 1"
        yield ("samples", "temperature"), runs


def _data(recipe: SamplingRecipe) -> Iterator[Clash]:
    data = recipe.data
    if data.kind in QUESTIONS_ALONE and not data.corpus and recipe.retriever.needs_corpus:
        yield (
            ("data.corpus", "data.kind", "retriever.kind"),
            f"missing; a file of kind {data.kind} holds questions alone, and retriever.kind {recipe.retriever.kind} "
            "searches a corpus: name its file",
        )


def _policy(recipe: SamplingRecipe) -> Iterator[Clash]:
    policy, adapter = recipe.policy, recipe.program.adapter.kind
    if policy.kind == "local" and policy.model == "demo" and adapter != "compact":
        yield (
            ("program.adapter.kind", "policy.model"),
            f"the demo policy reads only the compact adapter's prompts, not {adapter}; set program.adapter.kind: "
            "compact, or name another policy.model",
        )


def _sampling(recipe: SamplingRecipe) -> Iterator[Clash]:
    settings = recipe.sampling
    if settings.prompts * settings.samples < 2:
        yield (
            ("sampling.samples", "sampling.prompts"),
            "one prompt and one sample give one completion a state, and nothing to compare it with; raise "
            "sampling.prompts or sampling.samples",
        )
    if recipe.policy.temperature == 0 and settings.samples > 1:
        yield (
            ("sampling.samples", "policy.temperature"),
            f"at policy.temperature 0 the {settings.samples} samples of a prompt are the same; set "
            "policy.temperature: 1.0, or sampling.samples: 1",
        )
    if settings.margin and settings.strategy != "margin":
        yield (
            ("sampling.margin", "sampling.strategy"),
            f"strategy {settings.strategy} takes none; set sampling.strategy: margin, or remove it",
        )
    if settings.prompts - 1 > settings.bank.candidates:
        yield (
            ("sampling.prompts", "sampling.bank.candidates"),
            f"{settings.prompts - 1} few-shot prompts cannot be the best of {settings.bank.candidates} candidates; "
            "raise sampling.bank.candidates",
        )


def _training(recipe: TrainingRecipe) -> Iterator[Clash]:
    if recipe.warmup_ratio and recipe.lr_scheduler_type == "constant":
        yield (
            ("warmup_ratio", "lr_scheduler_type"),
            "lr_scheduler_type constant has no warm-up; set constant_with_warmup, or remove it",
        )
    if recipe.init_from == recipe.policy_name:
        yield ("init_from", "name"), f"{recipe.init_from} would start from itself; give the new policy a name"
