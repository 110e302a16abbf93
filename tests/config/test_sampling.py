"""The sampling recipe: the class of each section, and the keys that may change when a run goes on."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from leret.config.base import free_keys
from leret.config.policy import LocalPolicySettings
from leret.config.retriever import BM25Settings
from leret.config.sampling import ProgramSettings, SamplingRecipe

DATA = {"kind": "world"}


def test_a_recipe_needs_data_alone() -> None:
    recipe = SamplingRecipe.model_validate({"data": DATA})
    assert (type(recipe.retriever), type(recipe.policy)) == (BM25Settings, LocalPolicySettings)
    assert recipe.sampling.prompts == 4


def test_a_dumped_recipe_is_read_again_with_the_keys_of_its_kinds() -> None:
    values = {"data": DATA, "policy": {"kind": "openai", "model": "m", "urls": ["http://a/v1"]}}
    recipe = SamplingRecipe.model_validate(values)
    assert recipe.model_dump(mode="json")["policy"]["urls"] == ["http://a/v1"]
    assert SamplingRecipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_other_keys_of_the_program_go_to_its_constructor() -> None:
    assert ProgramSettings(path="p.py:P", hops=3).arguments == {"hops": 3}  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match=r"p\.py:ClassName"):
        ProgramSettings(path="p.py")


def test_what_decides_a_sample_may_not_change() -> None:
    free = free_keys(SamplingRecipe)
    assert {"sampling.concurrency", "sampling.strategy", "sampling.max_error_rate", "program.path", "pretrain"} <= free
    deciding = {
        "sampling.seed",
        "sampling.reward",
        "sampling.samples",
        "retriever.k",
        "policy.temperature",
        "data.kind",
    }
    assert not deciding & free
