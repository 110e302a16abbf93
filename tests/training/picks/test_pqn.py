import math

import pytest
import torch

from leret.training.picks.picking import as_table, step_rewards
from leret.training.picks.pqn import soft_value


def test_a_soft_value_is_the_logarithm_of_summed_exponentials():
    expected = 0.3 * math.log(math.exp(0.1 / 0.3) + math.exp(0.7 / 0.3))
    q = torch.tensor([[0.1, 0.7, -math.inf], [0.7, -9.0, 0.1]], dtype=torch.float64)
    assert soft_value(q, 0.3, k=2).tolist() == pytest.approx([expected] * 2, abs=1e-12)


def test_a_hard_value_is_the_limit_of_soft_ones():
    q = torch.tensor([[0.1, 0.7, 0.3]], dtype=torch.float64)
    assert soft_value(q, 0.0).tolist() == [0.7]
    assert float(soft_value(q, 1e-4)[0]) == pytest.approx(0.7, abs=1e-3)
    assert float(soft_value(q, 0.5, k=1)[0]) == pytest.approx(0.7)


@pytest.mark.parametrize(("at_end", "expected"), [(False, [0.5, 0.5, 0.25]), (True, [0.0, 1.0, 0.25])])
def test_a_step_is_paid_what_it_adds_or_the_last_one_all(at_end, expected):
    assert step_rewards(torch.tensor([0.5, 1.0, 0.25]), torch.tensor([0, 0, 1]), at_end).tolist() == expected
    table, mask = as_table(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4, 4, 7]))
    assert (table.tolist(), mask.tolist()) == ([[1.0, 2.0], [3.0, 0.0]], [[True, True], [True, False]])
