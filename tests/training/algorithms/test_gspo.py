"""GSPO against the paper's equations in float64, and against TRL's sequence-level ratio."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from leret.training.algorithms.gspo import GSPORecipe
from leret.training.stage import train
from tests.training.online.conftest import run  # noqa: F401  a run with a program
from tests.training.online.test_loop import SMALL
from tests.training.online.test_update import batch, make, nudge, same_gradients, same_update, trl_inputs, trl_trainer
from tests.training.training_runs import bits, log, logp

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


def test_a_ratio_is_the_geometric_mean_of_its_tokens(base):
    update, given = make(base, GSPORecipe(epsilon=10, epsilon_high=10)), batch()
    shift = 0.5 / given.mask.sum(1, keepdim=True) * given.mask  # the log-ratios of a completion sum to 0.5
    given = replace(given, old_logps=update.evaluate(given)[0] - shift)
    expected = sum(
        -math.exp(0.5 / len(ids)) * float(advantage)
        for (_, ids), advantage in zip(given.sequences, given.advantages[:, 0], strict=True)
    )
    assert update.step(given)["loss"] == pytest.approx(expected / len(given.sequences), abs=1e-5)


def test_a_run_becomes_a_policy(run, base):  # noqa: F811
    report = train(GSPORecipe(**{**SMALL, "num_mini_batches": 2}), run)
    assert report.steps == 12
    assert {"clip_ratio/region_mean", "loss", "reward"} <= set.union(*map(set, log(report)))
    first = load_file(base / "model.safetensors")
    assert any(bits(report)[0][name] != weight.numpy().tobytes() for name, weight in first.items())
