"""Keys of online recipes: what they add up to, and what is refused."""

import re
from pathlib import Path

import pytest

from leret.config.load import load_recipe
from leret.core.errors import ConfigError
from leret.training.algorithms import ALGORITHMS, TrainingRecipe
from leret.training.algorithms.grpo import GRPORecipe
from leret.training.algorithms.ppo import PPORecipe
from leret.training.algorithms.rloo import RLOORecipe

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: grpo\nmatch_steps_of: ipo\n", "match_steps_of: not of this kind, but of sft, dpo, ipo, kto"),
        ("algorithm: grpo\nmax_length: 512\n", "max_length: not of this kind, but of sft"),
        (
            "algorithm: ppo\ngradient_accumulation_steps: 2\n",
            "gradient_accumulation_steps: not of this kind, but of sft",
        ),
        ("algorithm: ppo\nengine: trl\n", "engine: not of this kind, but of grpo"),
        ("algorithm: rloo\nloss_type: token\n", "loss_type: not of this kind, but of grpo, ppo"),
        ("algorithm: pick\nlora: {r: 4}\n", "lora: not of this kind"),
        ("algorithm: sft\nnum_generations: 4\n", "num_generations: not of this kind"),
        ("algorithm: grpo\nnum_generation: 4\n", "num_generation: unknown key; did you mean num_generations"),
        ("algorithm: grpo\ntarget_kl: 1.0\n", "target_kl moves beta, which is 0"),
        ("algorithm: grpo\nserved: true\n", "set lora too"),
        ("algorithm: grpo\ngradient_accumulation_steps: 2\n", "set engine: trl"),
        ("algorithm: grpo\nuse_vllm: true\n", "set engine: trl"),
        ("algorithm: grpo\nengine: trl\n", "set states: stored"),
        ("algorithm: grpo\nengine: trl\nstates: stored\nkeep_rollouts: above\n", "engine trl has no keep_rollouts"),
        ("algorithm: rloo\nengine: trl\nstates: stored\nentropy_coef: 0.1\n", "engine trl has no entropy_coef"),
    ],
)
def test_a_key_of_another_algorithm_or_engine_is_refused(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(tmp_path / "r.yaml", TrainingRecipe)


def test_trl_trains_grpo_and_rloo_but_not_ppo():
    shipped = load_recipe(str(ROOT / "training" / "grpo-trl.yaml"), TrainingRecipe, ())
    assert (type(shipped), shipped.uses_trl, shipped.samples_in_process) == (GRPORecipe, True, False)
    assert RLOORecipe(engine="trl", states="stored", gradient_accumulation_steps=2).uses_trl
    assert (PPORecipe().uses_trl, PPORecipe().samples_in_process) == (False, True)


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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shipped_recipes_name_every_key_with_a_comment(name):
    lines = (ROOT / "training" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    named = {word for line in lines[4:] for word in re.findall(r"\w+", line)}
    keys = {key for key in ALGORITHMS[name].settings.model_fields if "vllm" not in key}  # of grpo-trl.yaml
    without = {"match_steps_of", "warmup_steps"}
    if ALGORITHMS[name].is_online:
        without.add("gradient_accumulation_steps")  # of grpo-trl.yaml
    assert keys - named - without == set()
