import pytest
import torch
from pydantic import ValidationError

from leret.extras.rollout_filters import above, below, either
from leret.training.rounds.grpo import GRPORecipe


def test_a_rollout_is_kept_where_all_parts_agree():
    parts = torch.tensor([[1.0, 1.0, 5.0], [0.0, 0.0, 5.0], [1.0, 0.0, 5.0], [7.0, 8.0, 9.0]])
    groups = torch.tensor([0, 0, 0, 1])
    assert above(parts, groups).tolist() == [True, False, False, True]
    assert below(parts, groups).tolist() == [False, True, False, True]
    assert either(parts, groups).tolist() == [True, True, False, True]
    parts[:2, 1], parts[3, 0] = torch.nan, torch.nan  # does not apply to two of a group, to one alone
    assert above(parts, groups).tolist() == [True, False, True, True]


@pytest.mark.parametrize("n", range(2, 17))
@pytest.mark.parametrize("value", [0.1, 0.7, 12.63, 1234.1])
def test_a_part_without_spread_is_on_both_sides(n, value):
    parts = torch.stack([torch.full((n,), value), torch.arange(n).float()], 1)
    expected = torch.arange(n) >= (n - 1) / 2
    assert above(parts, torch.zeros(n).long()).equal(expected)


def test_an_unknown_filter_is_refused():
    with pytest.raises(ValidationError, match="unknown filter 'abov'; choose above, below, either or"):
        GRPORecipe(keep_rollouts="abov")
