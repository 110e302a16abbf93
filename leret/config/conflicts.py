"""Settings that are each fine and that cannot go together: found before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leret.config.base import Settings
from leret.config.evaluation import EvalRecipe
from leret.config.sampling import SamplingRecipe
from leret.config.training import TrainingRecipe
from leret.core.yaml import Key


@dataclass(frozen=True)
class Clash:
    """An impossible combination.

    Attributes:
        keys: of the recipe that take part, the one to mend first.
        message: what is wrong and what to do.
    """

    keys: tuple[Key, ...]
    message: str


def clashes(recipe: Settings) -> Iterator[Clash]:
    """Every impossible combination of a recipe whose single values are valid."""
    if isinstance(recipe, SamplingRecipe):
        yield from _data(recipe)
        yield from _policy(recipe)
        yield from _sampling(recipe)
    elif isinstance(recipe, TrainingRecipe):
        yield from _training(recipe)
    elif isinstance(recipe, EvalRecipe):
        yield from _evaluation(recipe)


def _data(recipe: SamplingRecipe) -> Iterator[Clash]:
    data = recipe.data
    kind = ("data", "kind")
    if data.kind == "world" and (data.corpus or data.questions):
        name = "corpus" if data.corpus else "questions"
        yield Clash((("data", name), kind), f"data.{name}: kind world is generated and reads no file; remove it")
    if data.kind != "world" and data.options:
        yield Clash(
            (("data", "options"), kind), "data.options: only kind world, which is generated, has any; remove them"
        )
    if data.kind in {"jsonl", "hover"} and not data.corpus and recipe.retriever.needs_corpus:
        yield Clash(
            (("data", "corpus"), kind),
            f"data.corpus is missing: questions of kind {data.kind} bring no documents; name the corpus file",
        )


def _policy(recipe: SamplingRecipe) -> Iterator[Clash]:
    policy, adapter = recipe.policy, recipe.program.adapter
    model = ("policy", "model")
    if policy.kind == "local" and policy.model == "demo" and adapter.kind != "compact":
        yield Clash(
            (("program", "adapter", "kind"), model),
            f"program.adapter.kind: the demo policy reads only the compact adapter's prompts, not {adapter.kind}; "
            "set program.adapter.kind: compact, or name another policy.model",
        )


def _sampling(recipe: SamplingRecipe) -> Iterator[Clash]:
    settings, temperature = recipe.sampling, recipe.policy.temperature
    prompts, samples = ("sampling", "prompts"), ("sampling", "samples")
    if settings.prompts * settings.samples < 2:
        yield Clash(
            (samples, prompts),
            "sampling.samples: one prompt and one sample give one completion a state, and nothing to compare it with; "
            "raise sampling.prompts or sampling.samples",
        )
    if temperature == 0 and settings.samples > 1:
        yield Clash(
            (samples, ("policy", "temperature")),
            f"sampling.samples: at policy.temperature 0 the {settings.samples} samples of a prompt are the same; "
            "set policy.temperature: 1.0, or sampling.samples: 1",
        )
    if settings.margin and settings.strategy != "margin":
        yield Clash(
            (("sampling", "margin"), ("sampling", "strategy")),
            f"sampling.margin: strategy {settings.strategy} takes none; set sampling.strategy: margin, or remove it",
        )
    few_shot, bank = settings.prompts - 1, settings.bank
    if few_shot > bank.candidates:
        yield Clash(
            (prompts, ("sampling", "bank", "candidates")),
            f"sampling.prompts: {few_shot} few-shot prompts cannot be the best of {bank.candidates} candidates; "
            "raise sampling.bank.candidates",
        )


def _training(recipe: TrainingRecipe) -> Iterator[Clash]:
    if recipe.algorithm == "dpo" and recipe.reduction != "sequence":
        yield Clash((("reduction",), ("algorithm",)), "reduction: dpo sums log-probabilities; remove it")
    if recipe.warmup_ratio and recipe.schedule == "constant":
        yield Clash(
            (("warmup_ratio",), ("schedule",)),
            "warmup_ratio: schedule constant has no warm-up; set schedule: constant_with_warmup, or remove it",
        )
    if recipe.init == recipe.policy_name:
        yield Clash((("init",), ("name",)), f"init: {recipe.init} would start from itself; give the new policy a name")


def _evaluation(recipe: EvalRecipe) -> Iterator[Clash]:
    if recipe.samples > 1 and recipe.temperature == 0:
        yield Clash(
            (("samples",), ("temperature",)),
            f"samples: at temperature 0 the {recipe.samples} runs of a question are the same; set samples: 1",
        )
    if not recipe.systems:
        yield Clash((("systems",),), "systems: none is named; add base, or leave the key out")
    if not recipe.measures:
        yield Clash((("measures",),), "measures: none is named; add recall, or leave the key out")
