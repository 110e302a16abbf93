import pytest
from pydantic import ValidationError

from leret.config.messages import describe
from leret.core.yaml import parse
from tests.config.test_base import Recipe


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("engine:\n  kind: words\n  k1: -1\n", "f:3: engine.k1: must be at least 0.0, got -1"),
        ("engine:\n  kind: words\n  k1: many\n", "f:3: engine.k1: must be a number, got 'many'"),
        ("engine:\n  kind: vector\n", "f:2: engine.kind: 'vector' is not one of words, vectors, both; did you mean"),
        ("engine: {k1: 1}\n", "f:1: engine.kind: missing; add it"),
        ("engine: {kind: vectors, model: m, nbits: 3}\n", "f:1: engine.nbits: 3 is not one of 1, 2"),
        ("engine:\n  kind: both\n  engines:\n    - {kind: words}\n    - {kind: vectors}\n",
         "f:5: engine.engines[1].model: missing; add it (its directory)"),
    ],
)  # fmt: skip
def test_faults_name_the_key_as_written(text, says):
    placed = parse(text, "f")
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(placed.value)
    details = list(caught.value.errors())
    assert [describe(detail, Recipe, placed)[: len(says)] for detail in details] == [says]
