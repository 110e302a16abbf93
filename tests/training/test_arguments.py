"""A training recipe reaches the trainer: optimizer, schedule, clipping."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.config.load import load_recipe
from leret.config.training import TrainingRecipe
from leret.training.algorithms.preference import preference_trainer
from leret.training.algorithms.sft import sft_trainer
from leret.training.process import surroundings
from leret.training.stage import train
from leret.training.tokens import Encoded

ROOT = Path(__file__).parents[2]
PAIRS = [Encoded([3, 40, 41, 4], ([50, 51, 5], [60, 5]))] * 16


def trainer_of(recipe, base, tmp_path):
    make = sft_trainer if recipe.algorithm == "sft" else preference_trainer
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    with surroundings(tmp_path, 1):
        trainer = make(recipe, model, tokenizer, PAIRS, tmp_path, "cpu")
        trainer.create_optimizer_and_scheduler(num_training_steps=400)
        return trainer


@pytest.mark.parametrize(("name", "batch", "epochs"), [("leret-sft", 8, 1), ("leret-ipo", 4, 2)])
def test_the_leret_recipes_have_the_settings_of_the_original(base, tmp_path, name, batch, epochs):
    recipe = load_recipe(ROOT / f"training/{name}.yaml", TrainingRecipe)
    trainer = trainer_of(recipe, base, tmp_path)
    assert type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)) is torch.optim.RMSprop
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.0}
    assert {(group["alpha"], group["momentum"]) for group in trainer.optimizer.param_groups} == {(0.99, 0)}
    assert trainer.args.max_grad_norm == 10
    assert (trainer.args.train_batch_size, trainer.args.gradient_accumulation_steps) == (batch, 1)
    assert trainer.args.num_train_epochs == epochs
    rates = []
    for _ in range(400):
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates[75] == pytest.approx(0.5e-7)
    assert rates[150:] == pytest.approx([1e-7] * 250)
    if recipe.algorithm == "ipo":
        assert (trainer.beta, recipe.reduction, recipe.init) == (0.05, "sequence", "leret-sft")


def test_the_optimizer_of_a_recipe_decides_the_weights(run, base):
    """A training with RMSprop and warm-up steps ends elsewhere than the default one, and lowers the loss."""
    settings = {"algorithm": "sft", "learning_rate": 1e-3, "batch_size": 8, "epochs": 4, "log_steps": 1}
    default = train(TrainingRecipe(**settings, name="adam"), run)
    other = train(TrainingRecipe(**settings, name="rms", optim="rmsprop", warmup_steps=4), run)
    assert other.loss_last < other.loss_first
    assert other.loss_last != default.loss_last


@pytest.mark.parametrize(
    ("keys", "told"),
    [({"optim": "RMSprop"}, "optim"), ({"warmup_ratio": 0.1, "warmup_steps": 5}, "exclude each other")],
)
def test_what_no_trainer_takes_is_refused_in_the_recipe(keys, told):
    with pytest.raises(ValidationError, match=told):
        TrainingRecipe(algorithm="sft", **keys)
