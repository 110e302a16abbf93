import pytest
import torch

from leret.training.rounds.losses import clipped_loss, entropy


def test_a_ratio_is_clipped_on_the_side_of_its_advantage():
    ratios, advantages = torch.tensor([0.5, 0.5, 1.5, 1.5]), torch.tensor([-1.0, 1.0, -1.0, 1.0])
    loss, clipped = clipped_loss(ratios.log(), advantages, 0.2, 0.3)
    assert loss.tolist() == pytest.approx([0.8, -0.5, 1.5, -1.3])
    assert clipped.tolist() == [True, False, False, True]


def test_entropy_is_that_of_the_distribution():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    assert torch.allclose(entropy(logits), torch.distributions.Categorical(logits=logits).entropy())
