"""`engine: keep-rollouts`: learn only from completions on one side of their group's mean reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from leret.config.base import Settings
from leret.rollouts.rounds import Sampled
from leret.training.rounds.advantages import Comparison, group_means
from leret.training.rounds.grpo import GRPO, GSPO, GRPORecipe, GSPORecipe
from leret.training.rounds.learner import Objective
from leret.training.rounds.ppo import PPO, PPORecipe
from leret.training.rounds.rloo import RLOO, RLOORecipe
from leret.training.rounds.update import RolloutBatch


class KeepKeys(Settings):
    """Keys of the filter."""

    engine: Literal["keep-rollouts"] = "keep-rollouts"
    keep_rollouts: Literal["above", "below", "either"] = Field(
        "above",
        description="use only completions with all reward parts above (below) their group mean",
    )


class KeepGRPO(KeepKeys, GRPORecipe):
    """GRPO on filtered completions."""


class KeepGSPO(KeepKeys, GSPORecipe):
    """GSPO on filtered completions."""


class KeepRLOO(KeepKeys, RLOORecipe):
    """RLOO on filtered completions."""


class KeepPPO(KeepKeys, PPORecipe):
    """PPO on filtered completions."""


def same_side_of_mean(
    parts: Tensor, groups: Tensor, side: Literal["above", "below", "either"]
) -> Tensor:
    """Return True for each completion with all parts (n, n_parts) on ``side`` of the group mean.

    ``either``: all above or all below. A part identical within the group, or NaN (inapplicable),
        counts as both.
    """
    # In float32, identical parts differ from their mean by more than `close`.
    parts = parts.double()
    applicable = (~parts.isnan()).to(parts)
    values = parts.nan_to_num()
    means = group_means(values, groups) / group_means(applicable, groups)
    distance = (parts - means).nan_to_num()
    close = 1e-9 * (1 + values.abs())
    above = (distance >= -close).all(1)
    below = (distance <= close).all(1)
    if side == "above":
        return above
    if side == "below":
        return below
    return above | below


def _filtered(objective: Objective) -> Objective:
    advantages: Callable[[Any, Sampled, Any, float], Any] = objective.advantages

    def filtered(recipe: Any, sampled: Sampled, batch: RolloutBatch, beta: float) -> RolloutBatch:
        """Return the completions to learn from; advantages of 0 if there are none."""
        whole: RolloutBatch = advantages(recipe, sampled, batch, beta)
        parts = sampled.parts if sampled.parts.shape[1] else sampled.rewards[:, None]
        compare = Comparison.of(sampled)
        chosen = compare.apply(same_side_of_mean, parts, recipe.keep_rollouts)
        chosen = chosen.to(whole.mask.device)
        if not chosen.any():
            return replace(whole, advantages=torch.zeros_like(whole.advantages))
        return whole.rows(chosen.nonzero()[:, 0])

    return replace(objective, advantages=filtered)


ENGINE = {
    "grpo": replace(GRPO, settings=KeepGRPO, objective=_filtered(GRPO.objective)),
    "gspo": replace(GSPO, settings=KeepGSPO, objective=_filtered(GSPO.objective)),
    "rloo": replace(RLOO, settings=KeepRLOO, objective=_filtered(RLOO.objective)),
    "ppo": replace(PPO, settings=KeepPPO, objective=_filtered(PPO.objective)),
}
"""`engine: keep-rollouts` by algorithm."""
