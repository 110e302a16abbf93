import re

import pytest

from leret.config.load import load_recipe
from leret.training.algorithms import ALGORITHMS, TrainingRecipe
from leret.training.rounds.grpo import GRPORecipe
from tests.sampling.fakes import ROOT


def test_rounds_are_counted_or_follow_from_passes():
    recipe = GRPORecipe(questions_per_round=4, num_train_epochs=2, num_iterations=3, num_mini_batches=2)
    assert (recipe.n_rounds(100), recipe.n_steps(100)) == (50, 300)
    assert GRPORecipe(max_steps=7, num_iterations=2).n_rounds(100) == 4
    assert GRPORecipe().n_rounds(1) == 1


@pytest.mark.parametrize("name", [name for name, one in ALGORITHMS.items() if one.is_online])
def test_shipped_recipes_name_every_key_of_the_algorithm_with_its_default(name):
    path = ROOT / "training" / f"{name}.yaml"
    shipped, default = load_recipe(str(path), TrainingRecipe, ()), ALGORITHMS[name].settings()
    own = {key for key in type(default).model_fields if key not in TrainingRecipe.model_fields}
    assert {key for key in own if getattr(shipped, key) != getattr(default, key)} == set()


@pytest.mark.parametrize("name", [*ALGORITHMS, "retriever-kl"])
def test_shipped_recipes_name_every_key_with_a_comment(name):
    lines = (ROOT / "training" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    named = {word for line in lines[4:] for word in re.findall(r"\w+", line)}
    keys = set(TrainingRecipe.find(name).settings.model_fields)
    without = {"match_steps_of", "warmup_steps"}
    if name == "retriever-kl":  # refuses validation
        without |= {"eval_steps", "eval_split", "eval_tasks", "metric_for_best_model"}
    assert keys - named - without == set()
