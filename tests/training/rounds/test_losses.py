import math

import pytest
import torch

from leret.training.rounds.losses import (
    clipped_loss,
    entropy,
    importance_weights,
    k1,
    k3,
    reduce_loss,
    value_loss,
)

N, WIDTH = 5, 7
LENGTHS = (7, 1, 4, 3, 6)
MASK = torch.tensor([[t < n for t in range(WIDTH)] for n in LENGTHS]).double()


def table(seed, scale=1.0):
    return scale * torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens():
    return [(i, t) for i, n in enumerate(LENGTHS) for t in range(n)]


def surrogate(ratio, advantage, low, high):
    clipped = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, clipped * advantage)


@pytest.mark.parametrize("seed", range(5))
def test_the_clipped_surrogate_is_the_papers(seed):
    new, old, advantages = table(seed), table(seed) + table(seed + 50, 0.4), table(seed + 99)
    loss, clipped = clipped_loss((new - old) * MASK, advantages, 0.2, 0.3)
    for i, t in tokens():
        ratio, advantage = math.exp(new[i, t] - old[i, t]), float(advantages[i, t])
        assert float(loss[i, t]) == pytest.approx(surrogate(ratio, advantage, 0.2, 0.3), abs=1e-6)
        held = (ratio < 0.8 and advantage < 0) or (ratio > 1.3 and advantage > 0)
        assert bool(clipped[i, t]) == held


def test_divergences_estimate_that_of_two_distributions():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = float((p.exp() * (p - q)).sum())
    for estimate in (k1, k3):
        assert float((p.exp() * estimate(p, q)).sum()) == pytest.approx(exact, abs=1e-6)
    assert bool((k3(p, q) >= 0).all())
    x = float(q[2] - p[2])
    assert float(k3(p, q)[2]) == pytest.approx(math.exp(x) - x - 1, abs=1e-6)


def test_a_value_is_held_near_the_old_one():
    new, old, returns = table(3), table(4), table(5)
    found = value_loss(new, old, returns, 0.2)
    for i, t in tokens():
        v, o, r = float(new[i, t]), float(old[i, t]), float(returns[i, t])
        near = min(max(v, o - 0.2), o + 0.2)
        assert float(found[i, t]) == pytest.approx(0.5 * max((v - r) ** 2, (near - r) ** 2), abs=1e-6)


def test_entropy_is_that_of_the_distribution():
    logits = table(6)
    for row, found in zip(logits, entropy(logits), strict=True):
        p = [math.exp(x) for x in row.tolist()]
        expected = -sum(x / sum(p) * math.log(x / sum(p)) for x in p)
        assert float(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["sequence", "token", "dapo"])
def test_parts_of_a_batch_add_up_to_the_papers_mean(kind):
    values, n = table(7), sum(LENGTHS)
    parts = sum(float(reduce_loss(values[rows], MASK[rows], kind, N, n)) for rows in (slice(0, 2), slice(2, N)))
    by_row = [[float(values[i, t]) for t in range(length)] for i, length in enumerate(LENGTHS)]
    over_rows = sum(sum(row) / len(row) for row in by_row) / N
    assert parts == pytest.approx(over_rows if kind == "sequence" else sum(map(sum, by_row)) / n, abs=1e-6)


def test_importance_weights_are_ratios_up_to_the_clip():
    difference = torch.tensor([[math.log(1.5), math.log(3.0), 9.0], [math.log(0.5), 0.0, math.log(4.0)]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    by_token = importance_weights(difference, mask, 2.0, "token")
    assert by_token.flatten().tolist() == pytest.approx([1.5, 2.0, 1.0, 0.5, 1.0, 2.0])
    by_sequence = importance_weights(difference, mask, 4.0, "sequence")
    assert by_sequence.flatten().tolist() == pytest.approx([4.0, 2.0])  # 1.5 * 3 is above the clip; .5 * 4
