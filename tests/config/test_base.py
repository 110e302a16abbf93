from typing import Annotated, Literal

from pydantic import Field

from leret.config.base import Free, RecipePath, Settings, free_keys, paths_in, with_paths


class Words(Settings):
    kind: Literal["words"] = "words"
    k1: float = Field(1.5, ge=0)
    batch: Annotated[int, Free()] = 8


class Vectors(Settings):
    kind: Literal["vectors"] = "vectors"
    model: Annotated[str, RecipePath("model", hub=True)] = Field(description="its directory")
    nbits: Literal[1, 2] = 2
    k1: Annotated[float, Free()] = 3


class Both(Settings):
    kind: Literal["both"] = "both"
    engines: tuple[Annotated[Words | Vectors, Field(discriminator="kind")], ...]


class Recipe(Settings):
    engine: Annotated[Words | Vectors | Both, Field(discriminator="kind")]
    program: Annotated[str, RecipePath("program", member=True)] = "p.py:P"
    demos: dict[str, Annotated[str, RecipePath("prompt")]] = Field(default_factory=dict)
    others: dict[str, Words] = Field(default_factory=dict)
    log: Annotated[Words | None, Free()] = None


RECIPE = Recipe.model_validate(
    {"engine": {"kind": "both", "engines": [{"kind": "words"}, {"kind": "vectors", "model": "m"}]}, "demos": {"a": "d"}}
)


def test_key_is_free_if_free_in_all_kinds():
    assert free_keys(Vectors) == {"k1"}
    assert free_keys(Recipe) == {"engine.batch", "engine.engines.batch", "others.*.batch", "log"}


def test_only_paths_change():
    found = {key: path for key, path, _ in paths_in(RECIPE)}
    assert found == {("engine", "engines", 1, "model"): "m", ("program",): "p.py", ("demos", "a"): "d"}
    expected = RECIPE.model_dump() | {"program": "/x/p.py:P", "demos": {"a": "/x/d"}}
    expected["engine"]["engines"][1]["model"] = "/x/m"
    assert with_paths(RECIPE, lambda key, path, mark: f"/x/{path}") == Recipe.model_validate(expected)
