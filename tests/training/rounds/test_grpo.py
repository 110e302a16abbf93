from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.training.rounds import update as module
from leret.training.rounds.grpo import GRPORecipe, GSPORecipe
from tests.training.rounds.test_update import (
    batch,
    make,
    nudge,
    same_gradients,
    same_update,
    trl_inputs,
    trl_trainer,
)
from tests.training.training_runs import logp


@pytest.mark.parametrize(
    ("packed", "size", "loss_type", "theirs", "beta"),
    [
        (True, 64, "dapo", "dapo", 0.0),
        (False, 4, "dapo", "dapo", 0.1),
        (True, 64, "sequence", "grpo", 0.1),
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


EPSILON = {"epsilon": 0.002, "epsilon_high": 0.003}


def gspo_oracle(model, old, completions):
    """Equation 5 of arXiv 2507.18071, one sequence at a time; True where a ratio is clipped."""
    losses, clipped = [], []
    for (prompt, ids), advantage in zip(completions.sequences, completions.advantages[:, 0].tolist(), strict=True):
        difference = logp(model, list(prompt), ids) - logp(old, list(prompt), ids).detach()
        ratio = (difference / len(ids)).exp()
        near = ratio.clamp(1 - 0.002, 1 + 0.003)
        losses.append(-torch.min(ratio * advantage, near * advantage))
        clipped.append(bool((near - ratio).detach() * advantage < 0))
    return torch.stack(losses).mean(), clipped


def test_one_update_of_gspo_is_the_papers_and_that_of_trl(base, tmp_path):
    update, given = make(base, GSPORecipe(**EPSILON)), batch()
    given = replace(given, old_logps=update.evaluate(given)[0])
    nudge(update.model, 0.1)
    figures = update.step(given)

    old, model = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    nudge(model, 0.1)
    loss, clipped = gspo_oracle(model, old, given)
    loss.backward()
    assert 0 < sum(clipped) < len(clipped)
    assert figures["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    same_gradients(update, model)

    theirs = AutoModelForCausalLM.from_pretrained(base)
    keys = {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0, **EPSILON}
    trainer = trl_trainer(base, tmp_path, "GRPO", theirs, **keys)
    nudge(theirs, 0.1)
    same_update(update, given, trainer, {**trl_inputs(given), "old_per_token_logps": given.old_logps})
