import math

import pytest
import torch

from leret.training.rounds.losses import (
    entropy,
    importance_weights,
)


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
