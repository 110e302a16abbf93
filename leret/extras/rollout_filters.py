"""Filters of rollouts by the parts of their rewards: ``keep_rollouts: above`` in a training recipe.

A filter maps the parts of the completions of a round, (n, n_parts), and the indices of their
groups, (n,), to the completions to learn from, (n,) of True or False. A part identical within the
group, or NaN (inapplicable), counts as above and below the mean.
"""

from __future__ import annotations

from torch import Tensor

from leret.training.rounds.advantages import group_means


def above(parts: Tensor, groups: Tensor) -> Tensor:
    """Return True for completions with all parts at or above the group mean."""
    distance, close = _distance(parts, groups)
    return (distance >= -close).all(1)


def below(parts: Tensor, groups: Tensor) -> Tensor:
    """Return True for completions with all parts at or below the group mean."""
    distance, close = _distance(parts, groups)
    return (distance <= close).all(1)


def either(parts: Tensor, groups: Tensor) -> Tensor:
    """Return True for completions with all parts on one side of the group mean."""
    return above(parts, groups) | below(parts, groups)


def _distance(parts: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distances from the group means, and the largest rounding errors."""
    # In float32, identical parts differ from their mean by more than `close`.
    parts = parts.double()
    applicable = (~parts.isnan()).to(parts)
    values = parts.nan_to_num()
    means = group_means(values, groups) / group_means(applicable, groups)
    return (parts - means).nan_to_num(), 1e-9 * (1 + values.abs())
