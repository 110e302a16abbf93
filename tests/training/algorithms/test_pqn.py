"""Values, returns and pair losses against hand-made figures and a tabular oracle."""

import itertools
import math
import random

import pytest
import torch

from leret.training.algorithms.pick import best_and_others
from leret.training.algorithms.pqn import soft_value
from leret.training.online.advantages import lambda_returns
from leret.training.online.picking import as_table, step_rewards

ALPHA, GAMMA = 0.3, 0.9


class Tabular:
    """Picking ``n_picks`` of ``n`` things for a prize on two of them: Q-values of soft iteration, by recursion."""

    def __init__(self, n: int, n_picks: int, gold: set[int], alpha: float, gamma: float) -> None:
        self.n, self.n_picks, self.gold, self.alpha, self.gamma = n, n_picks, gold, alpha, gamma
        self.table: dict[tuple[tuple[int, ...], int], float] = {}

    def reward(self, picked: tuple[int, ...]) -> float:
        return float(self.gold <= set(picked))

    def q(self, picked: tuple[int, ...], action: int) -> float:
        """Of the state after ``picked``: the prize is paid once, and the run ends at the last pick."""
        key = picked, action
        if key not in self.table:
            after = (*picked, action)
            gain = self.reward(after) - self.reward(picked)
            self.table[key] = gain + (self.gamma * self.value(after) if len(after) < self.n_picks else 0.0)
        return self.table[key]

    def value(self, picked: tuple[int, ...]) -> float:
        values = [self.q(picked, action) for action in self.actions(picked)]
        top = max(values)
        return top + self.alpha * math.log(sum(math.exp((v - top) / self.alpha) for v in values))

    def actions(self, picked: tuple[int, ...]) -> list[int]:
        return [action for action in range(self.n) if action not in picked]


@pytest.fixture
def oracle() -> Tabular:
    return Tabular(6, 3, {1, 4}, ALPHA, GAMMA)


def test_a_soft_value_is_that_of_the_oracle(oracle):
    for picked in itertools.chain.from_iterable(itertools.permutations(range(6), n) for n in range(3)):
        q = [oracle.q(picked, a) if a not in picked else -math.inf for a in range(6)]
        found = soft_value(torch.tensor([q], dtype=torch.float64), ALPHA)
        assert float(found[0]) == pytest.approx(oracle.value(picked), abs=1e-6)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_lambda_returns_over_the_oracles_values(oracle, lam):
    """Under lambda 0 they are its Q-values."""
    rng = random.Random(0)
    walks = [tuple(rng.sample(range(6), 3)) for _ in range(200)]
    rewards = torch.tensor([[oracle.reward(w[: t + 1]) - oracle.reward(w[:t]) for t in range(3)] for w in walks])
    values = torch.tensor([[oracle.value(w[:t]) for t in range(3)] for w in walks])
    found = lambda_returns(rewards.double(), values.double(), torch.ones(200, 3).double(), GAMMA, lam)
    for walk, row in zip(walks, found.tolist(), strict=True):
        expected = 0.0
        for t in (2, 1, 0):
            gain = oracle.reward(walk[: t + 1]) - oracle.reward(walk[:t])
            following = oracle.value(walk[: t + 1]) if t < 2 else 0.0
            expected = gain + GAMMA * ((1 - lam) * following + lam * expected if t < 2 else 0.0)
            assert row[t] == pytest.approx(expected, abs=1e-6)
            if lam == 0:
                assert row[t] == pytest.approx(oracle.q(walk[:t], walk[t]), abs=1e-6)


def test_a_hard_value_is_the_limit_of_soft_ones():
    q = torch.tensor([[0.1, 0.7, 0.3]], dtype=torch.float64)
    assert soft_value(q, 0.0).tolist() == [0.7]
    assert float(soft_value(q, 1e-4)[0]) == pytest.approx(0.7, abs=1e-3)
    assert float(soft_value(q, 0.5, k=1)[0]) == pytest.approx(0.7)


def test_a_run_that_ended_early_has_no_value_behind_it():
    rewards, values = torch.tensor([[1.0, 9.0]]), torch.tensor([[5.0, 7.0]])
    assert lambda_returns(rewards, values, torch.tensor([[1.0, 0.0]]), 0.9, 0.5).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(("at_end", "expected"), [(False, [0.5, 0.5, 0.25]), (True, [0.0, 1.0, 0.25])])
def test_a_step_is_paid_what_it_adds_or_the_last_one_all(at_end, expected):
    assert step_rewards(torch.tensor([0.5, 1.0, 0.25]), torch.tensor([0, 0, 1]), at_end).tolist() == expected
    table, mask = as_table(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4, 4, 7]))
    assert (table.tolist(), mask.tolist()) == ([[1.0, 2.0], [3.0, 0.0]], [[True, True], [True, False]])


def test_pairs_are_of_the_best_and_the_others_of_one_group():
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.5, 0.5, 0.2]), torch.tensor([0, 0, 0, 1, 1, 2])
    chosen, rejected, weights = best_and_others(rewards, groups)
    assert (chosen.tolist(), rejected.tolist(), weights.tolist()) == ([0, 2], [1, 1], [0.5, 0.5])
