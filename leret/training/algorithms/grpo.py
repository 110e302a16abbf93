"""GRPO: group relative policy optimization on fresh samples of the run's tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from leret.config.training import TinkerKeys, TRLKeys, WritingRecipe
from leret.training.online.algorithm import OnlineAlgorithm
from leret.training.online.base import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from leret.rollouts.rounds import Sampled
    from leret.training.online.update import Forward, RolloutBatch


class GRPORecipe(TRLKeys, TinkerKeys, WritingRecipe):
    """Group relative policy optimization."""

    algorithm: Literal["grpo"] = "grpo"
    loss_type: Literal["sequence", "token", "dapo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description="divide advantages by the standard deviation of the group or the round, or by 1",
    )

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _as_in_trl(cls, value: Any) -> Any:
        return {True: "group", False: "none"}[value] if isinstance(value, bool) else value

    def trl_arguments(self) -> dict[str, Any]:
        loss_type = {"sequence": "grpo", "token": "bnpo", "dapo": "dapo"}[self.loss_type]
        return {
            "loss_type": loss_type,
            "scale_rewards": self.scale_rewards,
            "entropy_coef": self.entropy_coef,
        }


def advantages(
    recipe: GRPORecipe, sampled: Sampled, batch: RolloutBatch, beta: float
) -> RolloutBatch:
    """Set a completion's advantages to its group-relative reward, or that of its rollout."""
    from leret.training.online.advantages import Comparison, group_relative

    values = Comparison.of(sampled).apply(
        group_relative, sampled.rewards.double(), recipe.scale_rewards
    )
    return replace(batch, advantages=values.to(batch.mask)[:, None] * batch.mask)


def loss(recipe: GRPORecipe, batch: RolloutBatch, now: Forward, beta: float) -> dict[str, Tensor]:
    """Return the clipped loss of token ratios, plus the KL penalty (arXiv 2402.03300, eq. 3)."""
    from leret.training.online.losses import clipped_loss
    from leret.training.online.update import penalized

    losses, clipped = clipped_loss(
        batch.log_ratio(now.logps), batch.advantages, recipe.epsilon, recipe.epsilon_high
    )
    policy = batch.mean(losses, recipe.loss_type)
    return penalized(policy, recipe, batch, now, beta, recipe.loss_type) | {
        "clipped": batch.token_mean(clipped)
    }


def _describe(recipe: GRPORecipe) -> str:
    penalty = f", KL penalty {recipe.beta:g} as in arXiv 2512.02556" if recipe.beta else ""
    n = recipe.num_generations
    return (
        f"group relative policy optimization (arXiv 2402.03300), {n} completions per state{penalty}"
    )


OBJECTIVE = Objective(advantages, loss)
GRPO = OnlineAlgorithm(GRPORecipe, OBJECTIVE, _describe)
