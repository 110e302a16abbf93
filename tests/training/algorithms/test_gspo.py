from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.training.algorithms.gspo import GSPORecipe
from tests.training.online.test_update import batch, make, nudge, same_gradients, same_update, trl_inputs, trl_trainer
from tests.training.training_runs import logp

EPSILON = {"epsilon": 0.002, "epsilon_high": 0.003}


def oracle(model, old, completions):
    """Equation 5 of arXiv 2507.18071, one sequence at a time; True where a ratio is clipped."""
    losses, clipped = [], []
    for (prompt, ids), advantage in zip(completions.sequences, completions.advantages[:, 0].tolist(), strict=True):
        difference = logp(model, list(prompt), ids) - logp(old, list(prompt), ids).detach()
        ratio = (difference / len(ids)).exp()
        near = ratio.clamp(1 - 0.002, 1 + 0.003)
        losses.append(-torch.min(ratio * advantage, near * advantage))
        clipped.append(bool((near - ratio).detach() * advantage < 0))
    return torch.stack(losses).mean(), clipped


def test_one_update_is_the_papers_and_that_of_trl(base, tmp_path):
    update, given = make(base, GSPORecipe(**EPSILON)), batch()
    given = replace(given, old_logps=update.evaluate(given)[0])
    nudge(update.model, 0.1)
    figures = update.step(given)

    old, model = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    nudge(model, 0.1)
    loss, clipped = oracle(model, old, given)
    loss.backward()
    assert 0 < sum(clipped) < len(clipped)
    assert figures["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    same_gradients(update, model)

    theirs = AutoModelForCausalLM.from_pretrained(base)
    keys = {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0, **EPSILON}
    trainer = trl_trainer(base, tmp_path, "GRPO", theirs, **keys)
    nudge(theirs, 0.1)
    same_update(update, given, trainer, {**trl_inputs(given), "old_per_token_logps": given.old_logps})
