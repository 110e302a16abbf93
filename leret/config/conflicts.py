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
        yield from _sampling(recipe)
    elif isinstance(recipe, TrainingRecipe):
        if recipe.warmup_ratio and recipe.lr_scheduler_type == "constant":
            mend = "lr_scheduler_type constant has no warm-up; set constant_with_warmup, or remove it"
            yield ("warmup_ratio", "lr_scheduler_type"), mend
        if recipe.init_from == recipe.policy_name:
            yield ("init_from", "name"), f"{recipe.init_from} would start from itself; give the new policy a name"
    elif isinstance(recipe, EvalRecipe) and recipe.samples > 1 and recipe.temperature == 0:
        runs = f"at temperature 0 the {recipe.samples} runs of a question are the same; set samples: 1"
        yield ("samples", "temperature"), runs


def _sampling(recipe: SamplingRecipe) -> Iterator[Clash]:
    data, policy, settings, adapter = recipe.data, recipe.policy, recipe.sampling, recipe.program.adapter.kind
    if data.kind in QUESTIONS_ALONE and not data.corpus and recipe.retriever.needs_corpus:
        searched = f"retriever.kind {recipe.retriever.kind} searches a corpus: name its file"
        told = f"missing; a file of kind {data.kind} holds questions alone, and {searched}"
        yield ("data.corpus", "data.kind", "retriever.kind"), told
    if policy.kind == "local" and policy.model == "demo" and adapter != "compact":
        mend = "set program.adapter.kind: compact, or name another policy.model"
        told = f"the demo policy reads only the compact adapter's prompts, not {adapter}; {mend}"
        yield ("program.adapter.kind", "policy.model"), told
    if settings.prompts * settings.samples < 2:
        told = "one prompt and one sample give one completion a state, and nothing to compare it with"
        yield ("sampling.samples", "sampling.prompts"), f"{told}; raise sampling.prompts or sampling.samples"
    if policy.temperature == 0 and settings.samples > 1:
        told = f"at policy.temperature 0 the {settings.samples} samples of a prompt are the same"
        mend = "set policy.temperature: 1.0, or sampling.samples: 1"
        yield ("sampling.samples", "policy.temperature"), f"{told}; {mend}"
    if settings.margin and settings.strategy != "margin":
        told = f"strategy {settings.strategy} takes none; set sampling.strategy: margin, or remove it"
        yield ("sampling.margin", "sampling.strategy"), told
    if settings.prompts - 1 > settings.bank.candidates:
        told = f"{settings.prompts - 1} few-shot prompts cannot be the best of {settings.bank.candidates} candidates"
        yield ("sampling.prompts", "sampling.bank.candidates"), f"{told}; raise sampling.bank.candidates"
