"""What the recipes of all algorithms share; the keys of each are tested beside it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leret.config.base import free_keys
from leret.training.algorithms import ALGORITHMS, TrainingRecipe


def made(**values: Any) -> Any:
    return TrainingRecipe.model_validate(values)


def test_each_algorithm_has_a_recipe_class_of_its_own() -> None:
    assert {name: type(made(algorithm=name)) for name in ALGORITHMS} == {n: a.settings for n, a in ALGORITHMS.items()}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"algorithm": "sft", "beta": 0.1}, "beta"),
        ({"algorithm": "ipo", "name": "base"}, "cannot name a policy"),
        ({"algorithm": "ipo", "name": "a/b"}, "cannot name a policy"),
        ({"algorithm": "ipo", "warmup_ratio": 0.1, "warmup_steps": 3}, "exclude each other"),
    ],
)
def test_a_wrong_recipe_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        made(**values)


def test_a_policy_is_named_after_its_algorithm() -> None:
    assert made(algorithm="ipo").policy_name == "ipo"
    assert made(algorithm="ipo", name="mine").policy_name == "mine"
    assert made(algorithm="sft", match_steps_of="ipo").is_control


def test_what_decides_the_weights_may_not_change() -> None:
    free = free_keys(TrainingRecipe)
    assert {"save_steps", "logging_steps", "report_to", "device"} <= free
    assert not {"learning_rate", "seed", "num_train_epochs"} & free
