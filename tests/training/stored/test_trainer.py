from dataclasses import replace
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.config.load import load_recipe
from leret.config.training import ExampleRecipe, TrainingRecipe
from leret.core.errors import ConfigError, TrainingError
from leret.training.algorithms import ALGORITHMS
from leret.training.data import Encoded
from leret.training.stage import train
from leret.training.stored.preference import IPORecipe
from leret.training.stored.sft import SFTRecipe
from leret.training.stored.trainer import TrainerInputs, stored_trainer
from tests.sampling.fakes import ROOT
from tests.training.training_runs import trainer_of

PAIRS = [Encoded([3, 40, 41, 4], ([50, 51, 5], [60, 5]))] * 16


class ToyRecipe(ExampleRecipe):
    algorithm: Literal["toy"] = "toy"
    n: int = 4


def test_an_algorithm_is_added_by_its_file_and_a_line(run, tmp_path, monkeypatch):
    cut = lambda recipe, samples: ALGORITHMS["sft"].examples(SFTRecipe(), samples)[: recipe.n]  # noqa: E731
    toy = replace(ALGORITHMS["sft"], settings=ToyRecipe, examples=cut, describe=lambda recipe: f"{recipe.n} of sft")
    monkeypatch.setitem(ALGORITHMS, "toy", toy)
    (tmp_path / "toy.yaml").write_text("algorithm: toy\nn: 3\nper_device_train_batch_size: 2\n")
    report = train(load_recipe(tmp_path / "toy.yaml", TrainingRecipe), run)
    assert (report.path.name, report.examples, report.steps) == ("toy", 3, 2)
    assert "trained with leret: 3 of sft." in (report.path / "README.md").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: ipa\n", "algorithm: 'ipa' is not one of sft, dpo, ipo, .*; did you mean ipo"),
        ("algorithm: sft\nbeta: 1\n", "beta: unknown key for this kind .known for dpo, ipo, .*; remove it"),
        ("algorithm: sft\nwarmup_ratio: 0.1\nwarmup_steps: 5\n", "cannot both be set"),
        ("algorithm: ipo\nlosses: {ipo: 0}\n", "losses.ipo: .*greater than 0"),
        ("algorithm: sft\nlora: {quantization: nf4}\n", "nf4 needs bfloat16; set dtype: bfloat16 too"),
        ("algorithm: sft\nreport_to: [mlflow]\n", "trackio"),
        ("algorithm: sft\neval_split: test\n", "eval_split: 'test' is not one of dev, train"),
        ("algorithm: sft\nname: a/b\n", "cannot name a policy"),
        ("algorithm: sft\nname: mine\ninit_from: mine\n", "mine would start from itself"),
        ("algorithm: pqn\nlr_scheduler_type: linear\n", "min_lr_rate"),
        ("algorithm: grpo\nserved: true\n", "set lora too"),
        ("algorithm: grpo\nengine: trl\nstates: live\n", "states: .* stored"),
        ("algorithm: grpo\nengine: trl\nserved: true\n", "served: unknown key for this kind"),
        ("algorithm: sft\nengine: leret\n", "engine leret does not train sft"),
    ],
)
def test_keys_that_an_algorithm_or_engine_does_not_take_are_refused(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(tmp_path / "r.yaml", TrainingRecipe)


@pytest.mark.parametrize(("name", "batch", "epochs"), [("leret-sft", 8, 1), ("leret-ipo", 4, 2)])
def test_the_leret_recipes_have_the_settings_of_the_original(base, tmp_path, name, batch, epochs):
    recipe = load_recipe(ROOT / f"training/{name}.yaml", TrainingRecipe)
    trainer = trainer_of(recipe, AutoModelForCausalLM.from_pretrained(base), base, tmp_path, PAIRS)
    trainer.create_optimizer_and_scheduler(num_training_steps=400)
    assert type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)) is torch.optim.RMSprop
    groups = {(group["weight_decay"], group["alpha"], group["momentum"]) for group in trainer.optimizer.param_groups}
    assert groups == {(0.0, 0.99, 0)}
    given = trainer.args
    assert (given.train_batch_size, given.gradient_accumulation_steps, given.num_train_epochs) == (batch, 1, epochs)
    assert given.max_grad_norm == 10
    (schedule,) = set(trainer.lr_scheduler.lr_lambdas)
    assert [given.learning_rate * schedule(step) for step in (75, 150, 399)] == pytest.approx([0.5e-7, 1e-7, 1e-7])
    if isinstance(recipe, IPORecipe):
        assert (trainer.beta, recipe.reduction, recipe.init_from) == (0.05, "sequence", "leret-sft")


def test_an_adapter_with_a_reference_is_refused_under_fsdp(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr("leret.training.stored.trainer.N_PROCESSES", 2)
    inputs = TrainerInputs(None, None, (), tmp_path, "cuda")
    with pytest.raises(TrainingError, match=r"FSDP cannot train an adapter with ipo.*zero3"):
        stored_trainer("DPO", IPORecipe(lora={"r": 4, "alpha": 8}), inputs, {}, None, precompute_ref_log_probs=True)
