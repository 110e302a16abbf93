"""TRL's trainer, as it is built here, against the losses written out."""

import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.training.algorithms.preference import DPORecipe, IPORecipe, PairCollator, dpo_loss, ipo_loss
from leret.training.data import Encoded
from tests.training.training_runs import trainer_of

PAIRS = [
    Encoded([3, 40, 41, 42, 4], ([50, 51, 52, 53, 5], [60, 5])),
    Encoded([3, 43, 4], ([54, 5], [61, 62, 63, 5])),
    Encoded([3, 44, 45, 46, 47, 48, 4], ([55, 56, 5], [64, 65, 5])),
]


@pytest.fixture
def reference(base):
    return AutoModelForCausalLM.from_pretrained(base)


@pytest.fixture
def policy(reference):
    """The reference with all weights moved."""
    other = copy.deepcopy(reference)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.fixture
def trl(base, policy, tmp_path):
    """Loss and gradients that TRL's trainer has on the three pairs at the weights of ``policy``."""

    def loss_and_gradients(recipe):
        recipe = recipe.model_copy(update={"init_from": "base", "per_device_train_batch_size": 4})
        trainer = trainer_of(recipe, AutoModelForCausalLM.from_pretrained(base), base, tmp_path, PAIRS)
        trainer.model.load_state_dict(policy.state_dict())
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        return float(loss.detach()), [parameter.grad.clone() for parameter in trainer.model.parameters()]

    return loss_and_gradients


def logp(model, prompt, completion):
    """Sum of log-probabilities of a completion, one sequence at a time, in float64."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].double()
    logps = torch.log_softmax(logits, dim=-1)
    return sum(logps[len(prompt) - 1 + i, token] for i, token in enumerate(completion))


def columns(policy, reference, divide=False):
    """Log-probabilities of chosen and rejected under the policy, then under the reference; by token or in all."""

    def column(model, side):
        lengths = [len(pair.completions[side]) if divide else 1 for pair in PAIRS]
        sums = [logp(model, pair.prompt, pair.completions[side]) for pair in PAIRS]
        return torch.stack([total / n for total, n in zip(sums, lengths, strict=True)])

    return *(column(policy, side) for side in (0, 1)), *(column(reference, side).detach() for side in (0, 1))


@pytest.mark.parametrize("reduction", ["sequence", "token"])
def test_ipo_of_trl_with_moved_weights_is_the_loss_written_out(policy, reference, trl, reduction):
    expected = ipo_loss(*columns(policy, reference, divide=reduction == "token"), beta=0.05).mean()
    expected.backward()
    found, gradients = trl(IPORecipe(reduction=reduction, beta=0.05))
    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    assert abs(found - 100) > 0.1, "the weights must be off the reference, where every loss is 1 / (4 beta^2)"
    for ours, theirs in zip(policy.parameters(), gradients, strict=True):
        assert torch.allclose(ours.grad, theirs, rtol=1e-3, atol=1e-3 * float(ours.grad.abs().max()))


def test_dpo_of_trl_with_moved_weights_is_the_loss_on_sums(policy, reference, trl):
    expected = float(dpo_loss(*columns(policy, reference), beta=0.1).mean())
    assert trl(DPORecipe(beta=0.1))[0] == pytest.approx(expected, rel=1e-5)


def test_sft_weight_adds_the_mean_likelihood_of_the_chosen_tokens(policy, trl):
    n_tokens = sum(len(pair.completions[0]) for pair in PAIRS)
    total = sum(float(logp(policy, pair.prompt, pair.completions[0])) for pair in PAIRS)
    added = trl(IPORecipe(sft_weight=0.5))[0] - trl(IPORecipe())[0]
    assert added == pytest.approx(-0.5 * total / n_tokens, rel=1e-3)


def test_ipo_of_two_pairs_by_hand():
    # pair 1: h = (-3 + 5) - (-4 + 2) = 2 + 2 = 4, loss (4 - 10)^2 = 36
    # pair 2: h = (-1 + 1) - (-9 + 6) = 0 + 3 = 3, loss (3 - 10)^2 = 49
    columns = [torch.tensor(x, dtype=torch.float64) for x in ([-3.0, -1], [-4.0, -9], [-5.0, -1], [-2.0, -6])]
    assert ipo_loss(*columns, beta=0.05).tolist() == pytest.approx([36.0, 49.0], abs=1e-12)


def test_dpo_of_one_pair_by_hand():
    # h = (-3 + 5) - (-4 + 2) = 4, loss -log(1 / (1 + exp(-0.1 * 4)))
    columns = [torch.tensor([x], dtype=torch.float64) for x in (-3.0, -4.0, -5.0, -2.0)]
    assert float(dpo_loss(*columns, beta=0.1)) == pytest.approx(math.log(1 + math.exp(-0.4)), abs=1e-12)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sequence", [True, False])
def test_the_mask_of_the_sequence_reduction_sums_to_one(packed, sequence):
    rows = [
        {"prompt_tokens": [1, 2], "chosen_tokens": [3, 4, 5], "rejected_tokens": [6]},
        {"prompt_tokens": [7], "chosen_tokens": [8], "rejected_tokens": [9, 9]},
    ]
    mask = PairCollator(0, sequence=sequence, packed=packed)(rows)["completion_mask"]
    lengths = [3, 1, 1, 2]
    assert mask[:, 1:].sum(dim=1).tolist() == lengths
    assert mask.sum(dim=1).tolist() == ([1] * 4 if sequence else lengths)
