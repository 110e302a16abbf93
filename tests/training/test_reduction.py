import math

import pytest
import torch

from leret.training.algorithms.losses import PairCollator, dpo_loss, ipo_loss


def hand_ipo(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta):
    """Eq. 17 in Python's floats (float64), one pair."""
    h = (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)
    return (h - 0.5 / beta) ** 2


def test_ipo_of_two_pairs_by_hand():
    # pair 1: h = (-3 + 5) - (-4 + 2) = 2 + 2 = 4, loss (4 - 10)^2 = 36
    # pair 2: h = (-1 + 1) - (-9 + 6) = 0 + 3 = 3, loss (3 - 10)^2 = 49
    columns = [torch.tensor(x, dtype=torch.float64) for x in ([-3.0, -1], [-4.0, -9], [-5.0, -1], [-2.0, -6])]
    assert ipo_loss(*columns, beta=0.05).tolist() == pytest.approx([36.0, 49.0], abs=1e-12)


def test_ipo_equals_the_float64_oracle_on_random_pairs():
    generator = torch.Generator().manual_seed(0)
    columns = [-40 * torch.rand(64, generator=generator, dtype=torch.float64) for _ in range(4)]
    for beta in (0.01, 0.05, 0.5):
        expected = [hand_ipo(*(float(column[i]) for column in columns), beta) for i in range(64)]
        assert ipo_loss(*columns, beta=beta).tolist() == pytest.approx(expected, rel=1e-12)


def test_ipo_is_at_its_least_where_the_log_ratios_differ_by_one_over_two_beta():
    chosen = torch.tensor([10.0])
    assert float(ipo_loss(chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1), beta=0.05)) == 0


def test_dpo_of_one_pair_by_hand():
    # h = (-3 + 5) - (-4 + 2) = 4, loss -log(1 / (1 + exp(-0.1 * 4)))
    columns = [torch.tensor([x], dtype=torch.float64) for x in (-3.0, -4.0, -5.0, -2.0)]
    assert float(dpo_loss(*columns, beta=0.1)) == pytest.approx(math.log1p(math.exp(-0.4)), rel=1e-12)


ROWS = [
    {"prompt_tokens": [1, 2], "chosen_tokens": [3, 4, 5], "rejected_tokens": [6], "prompt": "", "chosen": ""},
    {"prompt_tokens": [7], "chosen_tokens": [8], "rejected_tokens": [9, 9], "prompt": "", "chosen": ""},
]


def test_the_mask_of_the_sequence_reduction_sums_to_one_and_marks_the_completions():
    batch = PairCollator(0, sequence=True)([dict(row) for row in ROWS])
    assert batch["completion_mask"].sum(dim=1).tolist() == [1, 1, 1, 1]
    assert batch["completion_mask"][:, 1:].tolist() == [[0, 1, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]]


def test_the_token_reduction_leaves_the_mask_of_trl():
    batch = PairCollator(0, sequence=False)([dict(row) for row in ROWS])
    assert batch["completion_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0]]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [7, 8, 0, 0, 0], [1, 2, 6, 0, 0], [7, 9, 9, 0, 0]]
