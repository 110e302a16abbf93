"""What the flags of `leret index` say to index, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leret.config.data import DataSettings
    from leret.config.retriever import RetrieverSettings
    from leret.datasets.corpus import Corpus


_MODEL_KEYS = {"dense": "model", "colbert": "checkpoint"}
"""What --model sets, by kind."""

_MODELS = {
    "dense": "a sentence-transformers model: its directory, or its name on the hub",
    "colbert": "the directory of a ColBERT checkpoint",
}

_TWO_ENGINES = "--set 'hybrid.engines=[{kind: bm25}, {kind: bm25, stopwords: null}]'"


def settings_of(
    recipe: str | None,
    kind: str | None,
    corpus: str | None,
    form: str | None,
    model: str | None,
    overrides: list[str],
    skip_invalid: bool,
) -> tuple[DataSettings, RetrieverSettings]:
    """What to index, and how: of a recipe, or of the flags.

    Raises:
        ConfigError: too little is named, both are, or a flag that the recipe or the kind has no use for.
    """
    from leret.config.load import load_recipe
    from leret.config.sampling import SamplingRecipe
    from leret.core.errors import ConfigError

    overrides = [f"retriever.{override.removeprefix('retriever.')}" for override in overrides]
    if recipe is not None:
        flags = {
            "--kind": kind,
            "--corpus": corpus,
            "--format": form,
            "--model": model,
            "--skip-invalid": skip_invalid or None,
        }
        given = [flag for flag, value in flags.items() if value is not None]
        if given:
            raise ConfigError(f"a recipe names the engine and the corpus; leave {', '.join(given)} out, or the recipe")
        found = load_recipe(recipe, SamplingRecipe, overrides, optional=("policy.model",))
        return found.data, found.retriever
    if corpus is None or kind is None:
        raise ConfigError("name a sampling recipe, or give --kind and --corpus")
    retriever: dict[str, Any] = {"kind": kind}
    if model is not None:
        if kind not in _MODEL_KEYS:
            raise ConfigError(f"--model is of kind {' and '.join(_MODEL_KEYS)}, not of {kind}; remove it")
        retriever[kind] = {_MODEL_KEYS[kind]: model}
    elif kind in _MODEL_KEYS and not any(override.startswith(f"retriever.{kind}.") for override in overrides):
        raise ConfigError(f"--kind {kind} needs --model, {_MODELS[kind]}")
    if kind == "hybrid" and not any(override.startswith("retriever.hybrid") for override in overrides):
        raise ConfigError(
            f"--kind hybrid needs two engines; add {_TWO_ENGINES}, say; one with a model is "
            "{kind: dense, dense: {model: DIR}}"
        )
    return _flagged(corpus, form, retriever, overrides, skip_invalid)


def corpus_of(corpus: str, form: str | None, skip_invalid: bool) -> Corpus:
    """The corpus that --corpus names.

    Raises:
        ConfigError: there is no such file, or no such --format.
        DataError: it cannot be read as what it claims to be.
    """
    from leret.datasets.load import load_corpus

    data, _ = _flagged(corpus, form, {}, [], skip_invalid)
    return load_corpus(data.kind, data.corpus, skip_invalid=data.skip_invalid)


def _flagged(
    corpus: str, form: str | None, retriever: dict[str, Any], overrides: list[str], skip_invalid: bool
) -> tuple[DataSettings, RetrieverSettings]:
    """What flags say, checked like a recipe."""
    from leret.config.load import flag_recipe

    data = {"kind": form or "jsonl", "corpus": corpus, "questions": corpus, "skip_invalid": skip_invalid}
    flags = {
        "data.kind": "--format", "data.corpus": "--corpus", "retriever.kind": "--kind",
        "retriever.dense.model": "--model", "retriever.colbert.checkpoint": "--model",
    }  # fmt: skip
    made = flag_recipe({"data": data, "retriever": retriever}, flags, overrides, ("data.questions",))
    return made.data, made.retriever
