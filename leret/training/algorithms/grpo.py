"""GRPO: group relative policy optimization on fresh samples of the run's states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from leret.training.online.algorithm import OnlineAlgorithm, writing
from leret.training.online.recipe import TwoEngines

if TYPE_CHECKING:
    from leret.rollouts.rounds import Sampled
    from leret.training.online.update import RolloutBatch


class GRPORecipe(TwoEngines):
    """Group relative policy optimization."""

    algorithm: Literal["grpo"] = "grpo"
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="what advantages are divided by: the standard deviation of a group, of the round, nothing"
    )


def estimate(recipe: GRPORecipe, sampled: Sampled, batch: RolloutBatch, beta: float) -> None:
    """The same advantage at all tokens of a completion: its reward beside its group's."""
    from leret.training.online.advantages import group_relative

    values = group_relative(sampled.rewards.double(), sampled.groups, recipe.scale_rewards)
    batch.advantages = values.to(batch.mask)[:, None] * batch.mask


def _describe(recipe: GRPORecipe) -> str:
    penalty = f", KL penalty {recipe.beta:g} as in arXiv 2512.02556" if recipe.beta else ""
    return (
        f"group relative policy optimization (arXiv 2402.03300), {recipe.num_generations} completions a state{penalty}"
    )


GRPO = OnlineAlgorithm(GRPORecipe, writing(estimate), _describe)
