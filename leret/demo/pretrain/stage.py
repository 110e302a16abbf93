"""`leret pretrain`: build a sampling recipe's small policy by imitating rules that never see gold documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from leret.config.sampling import PretrainSettings, SamplingRecipe
from leret.core.bundled import POLICIES
from leret.core.errors import ConfigError
from leret.core.progress import Progress
from leret.policies.checkpoints import minilm_directory

if TYPE_CHECKING:
    from leret.demo.pretrain.minilm import MiniLMSettings


def pretrain(recipe: SamplingRecipe, out: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Build a recipe's policy from the train split of its data, or continue a stopped build.

    ``out`` defaults to ``policy.model``, or to ``policies/NAME`` if ``policy.model`` names the shipped policy NAME.
    """
    settings = recipe.pretrain
    if settings is None:
        raise ConfigError(
            "pretrain: the recipe lacks this section; add `pretrain: {kind: minilm}` (see `leret init --policy minilm`)"
        )
    model = recipe.policy.model
    if out is None and recipe.policy.kind != "local":
        raise ConfigError(
            f"pretrain: policy.model {model} is on a server ({recipe.policy.kind}); choose a directory with --out"
        )
    directory = out or Path(f"policies/{model}" if model in POLICIES else model)
    from leret.demo.pretrain.minilm import pretrain_minilm
    from leret.programs.adapters import CompactAdapter, make_adapter
    from leret.rollouts.environment import Environment

    hyperparameters = minilm_settings(settings)
    adapter = make_adapter(recipe.program.adapter)
    if not isinstance(adapter, CompactAdapter):
        raise ConfigError("program.adapter.kind: pretrain.kind minilm reads at most 512 tokens; set kind: compact")
    minilm_directory()  # fail before reading the data if the weights are missing
    progress = progress or Progress()
    progress.start(f"pretraining {directory.name}", hyperparameters.steps)
    try:
        environment = Environment(recipe, directory / ".cache")
        questions, corpus = environment.tasks("train"), environment.corpus.values()
        k, retriever = recipe.retriever.k, environment.retriever
        return pretrain_minilm(questions, corpus, retriever, hyperparameters, k, adapter, directory, progress)
    finally:
        progress.finish()


def minilm_settings(settings: PretrainSettings) -> MiniLMSettings:
    """Return the settings of a recipe's ``pretrain`` section. ``options`` override the other keys."""
    from leret.demo.pretrain.minilm import MiniLMSettings

    keys = {"seed": settings.seed} | ({} if settings.steps is None else {"steps": settings.steps})
    try:
        return MiniLMSettings.model_validate({**keys, **settings.options})
    except ValidationError as error:
        faults = ((".".join(map(str, fault["loc"])), fault["msg"], fault["input"]) for fault in error.errors())
        raise ConfigError([f"pretrain.options.{key} is {value!r}: {text}" for key, text, value in faults]) from None
