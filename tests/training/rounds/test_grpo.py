from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.training.rounds import update as module
from leret.training.rounds.grpo import GRPORecipe, GSPORecipe
from tests.training.rounds.test_update import batch, make, same_update, trl_inputs, trl_trainer
from tests.training.training_runs import nudge


@pytest.mark.parametrize(
    ("packed", "size", "loss_type", "theirs", "beta"),
    [
        (True, 64, "dapo", "dapo", 0.0),
        (False, 4, "dapo", "dapo", 0.1),
        (True, 4, "sequence", "grpo", 0.1),
        (False, 4, "token", "bnpo", 0.0),
    ],
)
def test_one_update_of_grpo_is_that_of_trl(base, tmp_path, monkeypatch, packed, size, loss_type, theirs, beta):
    if not packed:
        monkeypatch.setattr(module, "share_prompts", lambda model: False)
    given = batch()
    update = make(base, GRPORecipe(loss_type=loss_type), with_reference=True, size=size)
    if beta:
        old = update.evaluate(given)[0]
        given = replace(given, old_logps=old, reference=old + 0.3 * torch.randn_like(given.mask) * given.mask)
        nudge(update.model)
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer = trl_trainer(base, tmp_path, "GRPO", model, beta=beta, loss_type=theirs)
    inputs = trl_inputs(given)
    if beta:
        nudge(model)
        inputs |= {"old_per_token_logps": given.old_logps, "ref_per_token_logps": given.reference}
    same_update(update, given, trainer, inputs, beta)


def test_one_update_of_gspo_is_that_of_trl(base, tmp_path):
    epsilon = {"epsilon": 0.002, "epsilon_high": 0.003}
    update, given = make(base, GSPORecipe(**epsilon)), batch()
    given = replace(given, old_logps=update.evaluate(given)[0])
    nudge(update.model, 0.1)
    assert 0 < update.step(given)["clipped"] < 1
    model = AutoModelForCausalLM.from_pretrained(base)
    keys = {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0, **epsilon}
    trainer = trl_trainer(base, tmp_path, "GRPO", model, **keys)
    nudge(model, 0.1)
    same_update(update, given, trainer, {**trl_inputs(given), "old_per_token_logps": given.old_logps})
