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


@pytest.mark.parametrize("name", [*ALGORITHMS, "retriever-kl"])
def test_shipped_recipes_name_every_key_with_a_comment_and_keys_of_rounds_with_their_default(name):
    path, settings = ROOT / "training" / f"{name}.yaml", TrainingRecipe.find(name).settings
    keys = set(settings.model_fields)
    named = {word for line in path.read_text("utf-8").splitlines()[4:] for word in re.findall(r"\w+", line)}
    without = {"match_steps_of", "warmup_steps"}
    if name == "retriever-kl":  # refuses validation
        without |= {"eval_steps", "eval_split", "eval_tasks", "metric_for_best_model"}
    assert keys - named - without == set()
    if TrainingRecipe.find(name).is_online:
        shipped, default = load_recipe(str(path), TrainingRecipe, ()), settings()
        own = keys - TrainingRecipe.model_fields.keys()
        assert {key for key in own if getattr(shipped, key) != getattr(default, key)} == set()
