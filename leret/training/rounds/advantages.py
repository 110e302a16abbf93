"""Advantage estimators for completions.

``groups`` (n,) is the index of each completion's state, from 0. Group members need not be adjacent,
and group sizes may differ. `leret.training.rounds.losses` describes the shapes of tensors over
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from leret.core.types import digest

if TYPE_CHECKING:
    from leret.config.training import RoundRecipe
    from leret.rollouts.rounds import Sampled

_SMALL = 1e-4  # added to a standard deviation, as in TRL


def group_means(values: Tensor, groups: Tensor) -> Tensor:
    """Return the mean of each value's group; values are (n,) or (n, m)."""
    n_groups = int(groups.max()) + 1
    sums = values.new_zeros(n_groups, *values.shape[1:]).index_add_(0, groups, values)
    sizes = torch.bincount(groups, minlength=n_groups).to(values.dtype).clamp(min=1)
    dimensions = [1] * (values.dim() - 1)
    means = sums / sizes.view(-1, *dimensions)
    return means[groups]


def group_deviations(values: Tensor, groups: Tensor) -> Tensor:
    """Return the sample standard deviation of each value's group, (n,); 0 in a group of one."""
    squares = group_means(centred(values, groups) ** 2, groups)
    sizes = torch.bincount(groups)[groups].to(values.dtype)
    variances = squares * sizes / (sizes - 1).clamp(min=1)
    return variances.sqrt()


def centred(values: Tensor, groups: Tensor) -> Tensor:
    """Return values (n,) minus their group mean, in float64.

    A difference that is only a rounding error becomes 0.

    Adam would amplify a rounding error, and KTO would use its sign as a label.
    """
    values = values.double()
    distance = values - group_means(values, groups)
    scale = group_means(values.abs(), groups)
    return distance.masked_fill(distance.abs() <= 1e-12 * scale, 0.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Indices of the rewards to compare: of a state's completions, or a question's rollouts.

    Attributes:
        groups: (n,) index of each completion's state or question.
        rollouts: (n,) index of each completion's rollout; None if each completion has its own
            reward.
    """

    groups: Tensor
    rollouts: Tensor | None = None

    @classmethod
    def of(cls, sampled: Sampled) -> Comparison:
        if sampled.rollouts is None:
            return cls(sampled.groups)
        return cls(sampled.walks, sampled.rollouts)

    def distinct(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and groups with one row per reward.

        Values are equal within each rollout.
        """
        groups = self.groups.to(values.device)
        if self.rollouts is None:
            return values, groups
        n_rollouts = int(self.rollouts.max()) + 1
        completions = torch.arange(len(self.rollouts))
        rows = torch.zeros(n_rollouts, dtype=torch.long).scatter(0, self.rollouts, completions)
        rows = rows.to(values.device)
        return values[rows], groups[rows]

    def apply(self, estimate: Callable[..., Tensor], values: Tensor, *more: Any) -> Tensor:
        """Return ``estimate(values, groups, *more)`` by reward, repeated for a rollout's turns."""
        estimates = estimate(*self.distinct(values), *more)
        if self.rollouts is None:
            return estimates
        return estimates[self.rollouts.to(estimates.device)]

    def totals(self, values: Tensor) -> Tensor:
        """Return values (n,) summed over each completion's rollout; unchanged without rollouts."""
        if self.rollouts is None:
            return values
        rollouts = self.rollouts.to(values.device)
        n_rollouts = int(rollouts.max()) + 1
        sums = values.new_zeros(n_rollouts).index_add_(0, rollouts, values)
        return sums[rollouts]


def group_relative(
    rewards: Tensor, groups: Tensor, scale: Literal["group", "batch", "none"]
) -> Tensor:
    """Return rewards (n,) minus their group mean, divided by the deviation that ``scale`` names.

    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2; ``none`` (no divisor): Liu et al.
        2025, arXiv 2503.20783.
    """
    distance = centred(rewards, groups)
    if scale == "none" or len(rewards) < 2:
        return distance
    if scale == "batch":
        return distance / (rewards.std() + _SMALL)
    return distance / (group_deviations(rewards, groups) + _SMALL)


def below_best(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return True (n,) where a reward is below the highest of its group, by more than rounding."""
    rewards = rewards.double()
    lowest = rewards.new_full((int(groups.max()) + 1,), -torch.inf)
    best = lowest.scatter_reduce(0, groups, rewards, "amax")[groups]
    return best - rewards > 1e-12 * best.abs()


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return rewards (n,) minus the mean of the group's other rewards; 0 in a group of one.

    Source: Ahmadian et al. 2024, arXiv 2402.14740, eq. 8 (Kool et al. 2019).
    """
    sizes = torch.bincount(groups)[groups].to(rewards.dtype)
    return centred(rewards, groups) * sizes / (sizes - 1).clamp(min=1)


def lambda_returns(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """Return lambda-returns (n, width): ``G[t] = r[t] + gamma * ((1 - lam) * V[t + 1] + lam * G[t + 1])``.

    Subtracting ``values`` gives generalized advantage estimates (Schulman et al. 2015, arXiv
    1506.02438, eq. 16). ``rewards`` are per step (token or pick), ``values`` are of the state
    before the step, and ``mask`` is 1 at steps; all are (n, width). The result is 0 where the mask
    is 0.

    Source: Q-RAG, arXiv 2511.07328, section 3 (Daley and Amato 2019, arXiv 1810.09967, eq. 2).
    """
    padded = torch.nn.functional.pad(values * mask, (0, 1))
    returns = torch.zeros_like(rewards)
    last = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        following = (1 - lam) * padded[:, t + 1] + lam * last
        last = mask[:, t] * (rewards[:, t] + gamma * following)
        returns[:, t] = last
    return returns


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Scale values to mean 0 and sample variance 1 over the mask; a single value becomes 0."""
    n = mask.sum()
    mean = (values * mask).sum() / n
    distance = (values - mean) * mask
    variance = (distance**2).sum() / (n - 1).clamp(min=1)
    return distance * torch.rsqrt(variance + 1e-8)


def group_statistics(rewards: Tensor, groups: Tensor) -> dict[str, float]:
    """Return the mean reward, mean deviation per group, and fraction of groups with deviation 0.

    The last two metrics ignore groups of one sample.
    """
    several = [group for group, size in enumerate(torch.bincount(groups)) if size > 1]
    statistics = {"reward": float(rewards.mean())}
    if several:
        by_sample = group_deviations(rewards, groups)
        deviations = torch.stack([by_sample[groups == group][0] for group in several])
        has_no_spread = deviations == 0
        statistics["reward_std"] = float(deviations.mean())
        statistics["frac_reward_zero_std"] = float(has_no_spread.float().mean())
    return statistics


def step_indices(recipe: RoundRecipe, groups: Tensor, number: int) -> Iterator[Tensor]:
    """Yield the sample indices of each optimizer step of round ``number``."""
    for order in range(recipe.num_iterations):
        yield from mini_batches(groups, recipe.num_mini_batches, recipe.seed, number, order)


def mini_batches(groups: Tensor, n: int, *seed: int) -> list[Tensor]:
    """Return the sample indices of each of ``n`` optimizer steps, shuffled with the seed.

    No group is split.
    """
    if n == 1:
        return [torch.arange(len(groups), device=groups.device)]
    states = groups.unique(sorted=True)
    generator = torch.Generator().manual_seed(int(digest(*seed)[:15], 16))
    order = torch.randperm(len(states), generator=generator)
    batches = []
    for chunk in states[order].tensor_split(n):
        if len(chunk):
            in_chunk = torch.isin(groups, chunk)
            batches.append(in_chunk.nonzero()[:, 0])
    return batches
