import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, MistralConfig, MistralForCausalLM

from leret.config.load import load_recipe
from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.training.algorithms import ALGORITHMS
from leret.training.stored.preference import IPORecipe
from leret.training.stored.trainer import TrainerInputs, check_logps, stored_trainer
from tests.sampling.fakes import ROOT
from tests.tiny import tiny_policy
from tests.training.stored.test_preference import PAIRS
from tests.training.training_runs import trainer_of

SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


@pytest.mark.parametrize(("name", "batch", "epochs"), [("leret-sft", 8, 1), ("leret-ipo", 4, 2)])
def test_the_leret_recipes_have_the_settings_of_the_original(base, tmp_path, name, batch, epochs):
    recipe = load_recipe(ROOT / f"training/{name}.yaml", TrainingRecipe)
    trainer = trainer_of(recipe, AutoModelForCausalLM.from_pretrained(base), base, tmp_path, PAIRS * 8)
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


def checked(model, base, directory, algorithm):
    recipe = ALGORITHMS[algorithm].settings(per_device_train_batch_size=2)
    return check_logps(trainer_of(recipe, model, base, directory, PAIRS), recipe.dtype)


def test_one_matrix_heads_pass(tmp_path, base, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path / "opt", "opt"))
    assert checked(model, base, tmp_path / "sft", "sft") is None
    assert checked(model, base, tmp_path / "dpo", "dpo") < 1e-5
    config = MistralConfig(**SMALL, num_attention_heads=2, num_key_value_heads=2, sliding_window=None)
    assert checked(MistralForCausalLM(config), base, tmp_path / "kto", "kto") < 1e-5, "of a kind with padded batches"
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    assert check_logps(None, "float32") is None, "no weight is whole"


@pytest.mark.parametrize("algorithm", ["ipo", "kto"])
def test_a_head_of_more_than_one_matrix_is_refused(tmp_path, base, algorithm):
    torch.manual_seed(0)
    bert = BertLMHeadModel(BertConfig(**SMALL, num_attention_heads=2, is_decoder=True))
    with pytest.raises(TrainingError, match=r"TRL computes a log-probability of .* BertLMHeadModel, but the model's"):
        checked(bert, base, tmp_path, algorithm)
