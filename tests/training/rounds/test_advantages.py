import random
import statistics
from functools import partial

import pytest
import torch

from leret.training.rounds import advantages
from leret.training.rounds.advantages import Comparison, group_relative, group_statistics, leave_one_out


@pytest.mark.parametrize("seed", range(3))
def test_a_reward_is_compared_with_its_group_or_the_others_of_it(seed):
    rng = random.Random(seed)
    groups = [rng.randrange(5) for _ in range(18)] + list(range(5))
    rewards = [rng.uniform(-3.5, 5) for _ in groups]
    given = torch.tensor(rewards).double(), torch.tensor(groups)
    relative = {scale: group_relative(*given, scale).tolist() for scale in ("group", "batch", "none")}
    alone = leave_one_out(*given).tolist()
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        own = [other for other, number in zip(rewards, groups, strict=True) if number == group]
        above = reward - statistics.fmean(own)
        within = statistics.stdev(own) if len(own) > 1 else 0.0
        divisors = {"group": within + 1e-4, "batch": statistics.stdev(rewards) + 1e-4, "none": 1.0}
        for scale, divisor in divisors.items():
            assert relative[scale][i] == pytest.approx(above / divisor, abs=2e-6)
        others = (sum(own) - reward) / (len(own) - 1) if len(own) > 1 else reward
        assert alone[i] == pytest.approx(reward - others, abs=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -3.5, 0.0, 12.63, 1234.1])
@pytest.mark.parametrize("n", [2, 3, 7, 16])
def test_equal_rewards_are_worth_exactly_nothing_and_have_no_spread(value, n):
    rewards, groups = torch.full((n,), value), torch.zeros(n).long()
    assert not group_relative(rewards.double(), groups, "group").any()
    assert not leave_one_out(rewards.double(), groups).any()
    equal = {"reward": value, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    assert group_statistics(rewards, groups) == pytest.approx(equal)


@pytest.mark.parametrize("seed", range(10))
def test_gae_is_the_weighted_sum_of_errors(seed):
    rng = random.Random(seed)
    width, gamma, lam = rng.randint(1, 9), rng.choice([1.0, 0.97]), rng.choice([0.0, 0.5, 0.95, 1.0])
    lengths = [rng.randint(1, width) for _ in range(3)]
    rewards, values = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.tensor([[t < n for t in range(width)] for n in lengths]).double()
    found = advantages.lambda_returns(rewards, values, mask, gamma, lam) - values * mask
    for i, n in enumerate(lengths):
        v = [*values[i, :n].tolist(), 0.0]
        errors = [float(rewards[i, t]) + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            expected = sum((gamma * lam) ** (s - t) * errors[s] for s in range(t, n))
            assert float(found[i, t]) == pytest.approx(expected, abs=1e-6)
        assert not found[i, n:].any()


def test_whitened_values_have_mean_0_and_variance_1():
    values, mask = torch.randn(4, 6, dtype=torch.float64), torch.ones(4, 6).double()
    mask[1:, 3:] = 0
    found = advantages.whiten(values, mask)
    inside = found[mask > 0]
    assert (float(inside.mean()), float(inside.var())) == pytest.approx((0.0, 1.0), abs=1e-6)
    assert not found[mask == 0].any()
    assert float(advantages.whiten(torch.tensor([[3.0]]), torch.ones(1, 1))) == 0.0


ROLLOUTS = torch.tensor([0, 1, 2, 2, 1, 2])  # of lengths 1, 2 and 3; rows are ordered by state
QUESTION = torch.zeros(6).long()
OUTCOMES = torch.tensor([1.0, 0.0, 0.5])


def test_a_rollout_counts_once_however_many_turns_it_has():
    compare = Comparison(QUESTION, ROLLOUTS)
    for estimate in (leave_one_out, partial(group_relative, scale="group"), partial(group_relative, scale="batch")):
        found = compare.apply(estimate, OUTCOMES[ROLLOUTS].double())
        assert found.tolist() == estimate(OUTCOMES.double(), torch.zeros(3).long())[ROLLOUTS].tolist()
    assert group_statistics(*compare.distinct(OUTCOMES[ROLLOUTS]))["reward"] == 0.5
    assert compare.totals(torch.ones(6)).tolist() == [1.0, 2.0, 3.0, 3.0, 2.0, 3.0]


def test_a_group_of_one_has_no_spread():
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 3.0]), torch.tensor([0, 1, 1, 2])
    expected = {"reward": 1.25, "reward_std": 0.5**0.5, "frac_reward_zero_std": 0.0}
    assert group_statistics(rewards, groups) == pytest.approx(expected)
    assert group_statistics(rewards[:1], groups[:1]) == {"reward": 1.0}
