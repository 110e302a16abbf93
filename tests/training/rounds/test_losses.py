import math

import pytest
import torch

from leret.training.rounds.losses import clipped_loss, entropy, importance_weights


def test_a_ratio_is_clipped_on_the_side_of_its_advantage():
    ratios, advantages = torch.tensor([0.5, 0.5, 1.5, 1.5]), torch.tensor([-1.0, 1.0, -1.0, 1.0])
    loss, clipped = clipped_loss(ratios.log(), advantages, 0.2, 0.3)
    assert loss.tolist() == pytest.approx([0.8, -0.5, 1.5, -1.3])
    assert clipped.tolist() == [True, False, False, True]


def test_importance_weights_are_ratios_up_to_the_clip():
    difference = torch.tensor([[math.log(1.5), math.log(3.0), 9.0], [math.log(0.5), 0.0, math.log(4.0)]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    by_token = importance_weights(difference, mask, 2.0, "token")
    assert by_token.flatten().tolist() == pytest.approx([1.5, 2.0, 1.0, 0.5, 1.0, 2.0])
    by_sequence = importance_weights(difference, mask, 4.0, "sequence")
    assert by_sequence.flatten().tolist() == pytest.approx([4.0, 2.0])  # 1.5 * 3 is above the clip; .5 * 4


def test_entropy_is_that_of_the_distribution():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    assert torch.allclose(entropy(logits), torch.distributions.Categorical(logits=logits).entropy())
