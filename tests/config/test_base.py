"""The marks on keys: what may change on resume, what names a file; through unions, lists and mappings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from leret.config.base import Free, RecipePath, Settings, free_keys, paths_in, with_paths
from leret.config.sampling import SamplingRecipe


class Words(Settings):
    kind: Literal["words"] = "words"
    k: int = 3
    batch: Annotated[int, Free()] = 8


class Vectors(Settings):
    kind: Literal["vectors"]
    model: Annotated[str, RecipePath("model", hub=True)]
    k: Annotated[int, Free()] = 3


class Both(Settings):
    kind: Literal["both"]
    engines: tuple[Annotated[Words | Vectors, Field(discriminator="kind")], ...]


class Recipe(Settings):
    engine: Annotated[Words | Vectors | Both, Field(discriminator="kind")]
    program: Annotated[str, RecipePath("program", member=True)] = "p.py:P"
    demos: dict[str, Annotated[str, RecipePath("prompt")]] = Field(default_factory=dict)
    log: Annotated[Words | None, Free()] = None


RECIPE = Recipe.model_validate(
    {"engine": {"kind": "both", "engines": [{"kind": "words"}, {"kind": "vectors", "model": "m"}]}, "demos": {"a": "d"}}
)


def test_free_keys_are_found_through_unions_and_lists() -> None:
    assert free_keys(Recipe) == {"engine.batch", "engine.engines.batch", "log"}


def test_a_key_that_decides_under_one_kind_is_not_free() -> None:
    assert "engine.k" not in free_keys(Recipe)
    assert free_keys(Vectors) == {"k"}


def test_paths_are_found_through_unions_lists_and_mappings() -> None:
    found = {key: path for key, path, _ in paths_in(RECIPE)}
    assert found == {("engine", "engines", 1, "model"): "m", ("program",): "p.py", ("demos", "a"): "d"}


def test_changed_paths_keep_the_class_behind_them_and_all_else() -> None:
    moved = with_paths(RECIPE, lambda key, path, mark: f"/x/{path}")
    assert moved.program == "/x/p.py:P"
    assert moved.demos == {"a": "/x/d"}
    assert isinstance(moved.engine, Both)
    assert [getattr(engine, "model", None) for engine in moved.engine.engines] == [None, "/x/m"]


def test_what_decides_a_sample_is_not_free() -> None:
    free = free_keys(SamplingRecipe)
    assert {"data.corpus", "policy.model", "sampling.strategy", "retriever.index"} <= free
    assert not {"data.seed", "data.split", "retriever.k", "sampling.seed", "policy.temperature"} & free
