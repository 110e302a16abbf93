"""`leret pretrain`: the small policy that a sampling recipe asks for, from gold-blind demonstrations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leret.config.sampling import PretrainSettings, SamplingRecipe
from leret.core.errors import ConfigError
from leret.core.progress import Progress, Silent

_Told = Callable[[int, Mapping[str, float]], None]


def pretrain(recipe: SamplingRecipe, out: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Build the recipe's policy, or go on building it.

    Args:
        recipe: its ``pretrain`` section says how; kind minilm also reads its data, the train split alone.
        out: the model directory; None takes ``policy.model``, and ``policies/demo`` where that is the shipped one.
        progress: hears of every line of the log.

    Returns:
        The model directory.

    Raises:
        ConfigError: the recipe has no ``pretrain`` section, or options that its kind does not have.
        MissingDependency: kind minilm, and MiniLM's weights are not installed.
        TrainingError: the directory holds pretraining with other settings, or training diverged.
        DataError, RetrievalError: the recipe's data cannot be read.
    """
    settings = recipe.pretrain
    if settings is None:
        raise ConfigError(
            "pretrain: the recipe has no such section; add `pretrain: {kind: scratch}`, as in sampling/demo.yaml, "
            "or `pretrain: {kind: minilm}`, as `leret init` writes it"
        )
    model = recipe.policy.model
    if out is None and recipe.policy.kind != "local":
        raise ConfigError(
            f"pretrain: policy.model {model} is a name on a server ({recipe.policy.kind}), not a directory; "
            "say with --out where the new policy shall go"
        )
    directory = out or Path("policies/demo" if model == "demo" else model)
    with _told(progress or Silent(), f"pretraining {directory.name}") as told:
        return _scratch(settings, directory, told) if settings.kind == "scratch" else _minilm(recipe, directory, told)


def _scratch(settings: PretrainSettings, directory: Path, told: _Told) -> Path:
    from leret.demo.pretrain.scratch import pretrain_scratch

    if settings.options:
        raise ConfigError(f"pretrain.options: kind scratch has none, not {', '.join(settings.options)}; remove them")
    return pretrain_scratch(
        directory, seed=settings.seed, steps=settings.steps, minutes=settings.minutes, progress=told
    )


def _minilm(recipe: SamplingRecipe, directory: Path, told: _Told) -> Path:
    from leret.demo.pretrain.decoder import weights_dir
    from leret.demo.pretrain.examples import ExampleSettings, Prompting
    from leret.demo.pretrain.minilm import MiniLMSettings, pretrain_minilm
    from leret.programs.adapters import CompactAdapter, make_adapter
    from leret.sampling.rollouts.environment import Environment

    settings = recipe.pretrain
    assert settings is not None  # asked for in `pretrain`
    changes: dict[str, Any] = {"seed": settings.seed}
    if settings.minutes is not None:
        raise ConfigError("pretrain.minutes: kind minilm is measured in steps; set pretrain.steps instead")
    if settings.steps is not None:
        changes["steps"] = settings.steps
    how = _with(MiniLMSettings(**changes), {"examples": {"seed": settings.seed, "k": recipe.retriever.k}})
    how = _with(how, settings.options)
    adapter = make_adapter(recipe.program.adapter)
    if not isinstance(adapter, CompactAdapter):
        raise ConfigError("program.adapter.kind: kind minilm has 512 positions; set program.adapter.kind: compact")
    weights_dir()  # before the data is read: whether the package is there
    bench = Environment(recipe, directory / ".cache")
    questions = bench.questions("train")
    assert isinstance(how.examples, ExampleSettings)
    return pretrain_minilm(
        questions, bench.corpus.values(), bench.retriever, how, directory, told, Prompting(adapter=adapter)
    )


def _with(value: Any, options: Mapping[str, Any], key: str = "pretrain.options") -> Any:
    """A frozen dataclass with some fields replaced; mappings go into the dataclasses inside it."""
    known = {field.name for field in dataclasses.fields(value)}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(f"{key}: no {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    changes = {}
    for name, given in options.items():
        inner = getattr(value, name)
        if dataclasses.is_dataclass(inner) and isinstance(given, Mapping):
            changes[name] = _with(inner, given, f"{key}.{name}")
        elif isinstance(inner, tuple) and isinstance(given, list) and len(given) == len(inner):
            changes[name] = tuple(given)
        elif isinstance(inner, Mapping) and _weights(given, inner):
            changes[name] = dict(given)
        elif isinstance(given, type(inner)) or (isinstance(inner, float) and isinstance(given, int)):
            changes[name] = given
        else:
            like = dict(inner) if isinstance(inner, Mapping) else inner
            raise ConfigError(f"{key}.{name}: must be like {like!r}, is {given!r}")
    return dataclasses.replace(value, **changes)


def _weights(given: Any, known: Mapping[str, float]) -> bool:
    """Whether a value is weights of some of the known styles, one of them above 0."""
    if not isinstance(given, Mapping) or not given.keys() <= known.keys():
        return False
    return all(isinstance(value, int | float) and value >= 0 for value in given.values()) and any(given.values())


@contextmanager
def _told(progress: Progress, what: str) -> Iterator[_Told]:
    """The trainer's own way to report, told to a `Progress`."""
    step = 0

    def told(at: int, figures: Mapping[str, float]) -> None:
        nonlocal step
        progress.advance(max(0, at - step), **{name: value for name, value in figures.items() if name != "step"})
        step = max(step, at)

    progress.start(what, None)
    try:
        yield told
    finally:
        progress.finish()
