"""Keys of online recipes: what they add up to, and what is refused."""

import re
from pathlib import Path

import pytest

from leret.config.load import load_recipe
from leret.training.algorithms import ALGORITHMS, OnlineAlgorithm, TrainingRecipe
from leret.training.algorithms.grpo import GRPORecipe
from leret.training.algorithms.ppo import PPORecipe
from leret.training.algorithms.rloo import RLOORecipe

ROOT = Path(__file__).parents[3]


def test_keys_without_a_use_are_refused():
    stored = {"gradient_accumulation_steps": 2}, {"match_steps_of": "ipo"}, {"max_length": 512}
    for keys in (*stored, {"target_kl": 1.0}):
        with pytest.raises(ValueError, match=rf"{'|'.join(keys)}; remove that|beta, which is 0"):
            GRPORecipe(**keys)
    with pytest.raises(ValueError, match="the loss of whole completions"):
        RLOORecipe(loss_type="token")


def test_trl_is_asked_for_what_it_has():
    shipped = load_recipe(str(ROOT / "training" / "grpo-trl.yaml"), TrainingRecipe, ())
    assert (type(shipped), shipped.by_trl) == (GRPORecipe, True)
    stored = {"engine": "trl", "states": "stored"}
    assert RLOORecipe(**stored, gradient_accumulation_steps=2).by_trl
    assert not PPORecipe().by_trl
    for kind, keys, said in (
        (GRPORecipe, {"engine": "trl"}, "set states: stored"),
        (GRPORecipe, {"use_vllm": True}, "engine: trl"),
        (GRPORecipe, {**stored, "keep_rollouts": "above"}, "no keep_rollouts"),
        (RLOORecipe, {**stored, "entropy_coef": 0.1}, "no entropy_coef"),
    ):
        with pytest.raises(ValueError, match=said):
            kind(**keys)


def test_rounds_are_counted_or_follow_from_passes():
    recipe = GRPORecipe(questions_per_round=4, num_train_epochs=2, num_iterations=3, num_mini_batches=2)
    assert (recipe.n_rounds(100), recipe.n_steps(100)) == (50, 300)
    assert GRPORecipe(max_steps=7, num_iterations=2).n_rounds(100) == 4
    assert GRPORecipe().n_rounds(1) == 1


@pytest.mark.parametrize("name", [name for name, one in ALGORITHMS.items() if isinstance(one, OnlineAlgorithm)])
def test_shipped_recipes_name_every_key_of_the_algorithm_with_its_default(name):
    path = ROOT / "training" / f"{name}.yaml"
    shipped, default = load_recipe(str(path), TrainingRecipe, ()), ALGORITHMS[name].settings()
    own = {key for key in type(default).model_fields if key not in TrainingRecipe.model_fields}
    assert {key for key in own if getattr(shipped, key) != getattr(default, key)} == set()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shipped_recipes_name_every_key_with_a_comment(name):
    lines = (ROOT / "training" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    told = {word for line in lines[4:] for word in re.findall(r"\w+", line)}
    keys = {key for key in ALGORITHMS[name].settings.model_fields if "vllm" not in key}  # of grpo-trl.yaml
    without = {"match_steps_of", "warmup_steps"}
    if isinstance(ALGORITHMS[name], OnlineAlgorithm):
        without |= {"gradient_accumulation_steps", "max_length", "lora", "dtype"}
    assert keys - told - without - ({"loss_type"} if name == "rloo" else set()) == set()
