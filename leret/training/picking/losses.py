"""Values, returns and losses of picks: pure functions of tensors.

Shapes: Q-values are (n_states, n_candidates) or, of several heads, (n_states, n_heads, n_candidates), where what is no
candidate is minus infinity; trajectories are (n_walks, width), one row a run of the program, padded at the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def soft_value(q: Tensor, temperature: float, k: int | None = None) -> Tensor:
    """The value of states: ``temperature * log(sum(exp(q / temperature)))`` over their k best candidates.

    Args:
        q: (..., n_candidates).
        temperature: 0 gives the largest value.
        k: None: all candidates.

    Returns:
        (...).

    Source: Q-RAG, arXiv 2511.07328, section 3 (Haarnoja et al. 2017, arXiv 1702.08165, eq. 3).
    """
    if temperature == 0:
        return q.amax(-1)
    best = q if k is None else q.topk(min(k, q.shape[-1]), -1).values
    return temperature * (best / temperature).logsumexp(-1)


def best_and_others(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of each group's best samples with all others of it.

    Args:
        rewards: (n,).
        groups: (n,) number of each sample's state.

    Returns:
        Places of the chosen and of the rejected, (n_pairs,) each, and the pairs' weights: those of a group sum to 1.
    """
    top = torch.full((int(groups.max()) + 1,), -math.inf, dtype=rewards.dtype).scatter_reduce(
        0, groups, rewards, "amax"
    )
    best = rewards >= top[groups] - 1e-9
    chosen, rejected = ((groups[:, None] == groups) & best[:, None] & ~best).nonzero(as_tuple=True)
    counts = torch.bincount(groups[chosen], minlength=len(top))
    return chosen, rejected, 1 / counts[groups[chosen]].to(rewards.dtype)


def gains(rewards: Tensor, walks: Tensor, at_end: bool = False) -> Tensor:
    """What each step of a run is paid, (n,), of its reward so far; the steps of a run stand together, in order.

    A step is paid what it adds; or, where rewards are those of the run's end, the last one all, and the others nothing.
    """
    starts = torch.cat([walks.new_ones(1, dtype=torch.bool), walks[1:] != walks[:-1]])
    if at_end:
        return rewards * torch.cat([starts[1:], starts.new_ones(1)])
    return rewards - torch.cat([rewards.new_zeros(1), rewards[:-1]]).masked_fill(starts, 0.0)


def as_table(values: Tensor, walks: Tensor) -> tuple[Tensor, Tensor]:
    """Values (n,) of steps as (n_walks, width) of runs, and the mask of their places."""
    sizes = torch.unique_consecutive(walks, return_counts=True)[1]
    mask = torch.arange(int(sizes.max())) < sizes[:, None]
    return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values), mask
