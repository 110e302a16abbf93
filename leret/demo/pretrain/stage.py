"""`leret pretrain`: the small policy that a sampling recipe asks for, from gold-blind demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from leret.config.sampling import PretrainSettings, SamplingRecipe
from leret.core.bundled import POLICIES
from leret.core.errors import ConfigError
from leret.core.progress import Progress, Silent

if TYPE_CHECKING:
    from leret.demo.pretrain.minilm import MiniLMSettings


def pretrain(recipe: SamplingRecipe, out: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Build the recipe's policy, or go on building it.

    Args:
        recipe: its ``pretrain`` section says how; of its data, the train split is read.
        out: the model directory; None takes ``policy.model``, and ``policies/NAME`` where that is a shipped one.
        progress: hears of every line of the log.
    """
    settings = recipe.pretrain
    if settings is None:
        raise ConfigError(
            "pretrain: the recipe has no such section; add `pretrain: {kind: minilm}`, as `leret init --policy minilm` "
            "writes it"
        )
    model = recipe.policy.model
    if out is None and recipe.policy.kind != "local":
        raise ConfigError(
            f"pretrain: policy.model {model} is a name on a server ({recipe.policy.kind}), not a directory; "
            "say with --out where the new policy shall go"
        )
    directory = out or Path(f"policies/{model}" if model in POLICIES else model)
    from leret.demo.pretrain.decoder import weights_dir
    from leret.demo.pretrain.minilm import pretrain_minilm
    from leret.programs.adapters import CompactAdapter, make_adapter
    from leret.rollouts.environment import Environment

    how = minilm_settings(settings)
    adapter = make_adapter(recipe.program.adapter)
    if not isinstance(adapter, CompactAdapter):
        raise ConfigError("program.adapter.kind: kind minilm has 512 positions; set program.adapter.kind: compact")
    weights_dir()  # before the data is read: whether the package is there
    progress = progress or Silent()
    progress.start(f"pretraining {directory.name}", how.steps)
    try:
        environment = Environment(recipe, directory / ".cache")
        questions, corpus = environment.tasks("train"), environment.corpus.values()
        k = recipe.retriever.k
        return pretrain_minilm(questions, corpus, environment.retriever, how, k, adapter, directory, progress)
    finally:
        progress.finish()


def minilm_settings(settings: PretrainSettings) -> MiniLMSettings:
    """The recipe's section as settings of its kind; ``options`` win over the section's own keys."""
    from leret.demo.pretrain.minilm import MiniLMSettings

    own = {"seed": settings.seed} | ({} if settings.steps is None else {"steps": settings.steps})
    try:
        return MiniLMSettings.model_validate({**own, **settings.options})
    except ValidationError as error:
        faults = ((".".join(map(str, fault["loc"])), fault["msg"], fault["input"]) for fault in error.errors())
        raise ConfigError([f"pretrain.options.{key}: {what}, is {given!r}" for key, what, given in faults]) from None
