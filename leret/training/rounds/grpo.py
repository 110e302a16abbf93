"""GRPO on fresh samples of the run's tasks, and GSPO: GRPO with one ratio per completion."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from leret.config.base import Settings
from leret.config.training import WritingRecipe
from leret.training.rounds.algorithm import RoundAlgorithm, writer
from leret.training.rounds.learner import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from leret.rollouts.rounds import Sampled
    from leret.training.rounds.update import Forward, RolloutBatch


class GRPOKeys(Settings):
    """Keys of GRPO in leret's loop and in TRL's trainer."""

    algorithm: Literal["grpo"] = "grpo"
    loss_type: Literal["sequence", "token", "dapo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description="divide advantages by the standard deviation of the group or the round, or by 1",
    )


class GRPORecipe(GRPOKeys, WritingRecipe):
    """Group relative policy optimization."""

    engine: Literal["leret"] = "leret"


def advantages(
    recipe: GRPORecipe, sampled: Sampled, batch: RolloutBatch, beta: float
) -> RolloutBatch:
    """Set a completion's advantages to its group-relative reward, or that of its rollout."""
    from leret.training.rounds.advantages import Comparison, group_relative

    values = Comparison.of(sampled).apply(
        group_relative, sampled.rewards.double(), recipe.scale_rewards
    )
    return replace(batch, advantages=values.to(batch.mask)[:, None] * batch.mask)


def loss(recipe: GRPORecipe, batch: RolloutBatch, now: Forward, beta: float) -> dict[str, Tensor]:
    """Return the clipped loss of token ratios, plus the KL penalty (arXiv 2402.03300, eq. 3)."""
    from leret.training.rounds.losses import clipped_loss
    from leret.training.rounds.update import penalized

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


class GSPORecipe(WritingRecipe):
    """Group sequence policy optimization; the default clip range is from the paper."""

    algorithm: Literal["gspo"] = "gspo"
    num_mini_batches: PositiveInt = Field(4, description="optimizer steps per pass")
    epsilon: float = Field(
        3e-4, gt=0, description="lower clip bound of the length-normalized ratio: 1 - epsilon"
    )
    epsilon_high: float | None = Field(
        4e-4, gt=0, description="upper clip bound: 1 + epsilon_high; None: 1 + epsilon"
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description="divide advantages by the standard deviation of the group or the round, or by 1",
    )


def gspo_loss(
    recipe: GSPORecipe, batch: RolloutBatch, now: Forward, beta: float
) -> dict[str, Tensor]:
    """Return the clipped surrogate loss of length-normalized ratios (arXiv 2507.18071, eq.

    5 and 7).
    """
    from leret.training.rounds.losses import clipped_loss
    from leret.training.rounds.update import penalized

    log_ratio = batch.log_ratio(now.logps).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
    losses, clipped = clipped_loss(
        log_ratio, batch.advantages[:, :1], recipe.epsilon, recipe.epsilon_high
    )
    policy = batch.sequence_mean(losses)
    return penalized(policy, recipe, batch, now, beta, "sequence") | {
        "clipped": batch.token_mean(clipped)
    }


def _describe_gspo(recipe: GSPORecipe) -> str:
    return f"group sequence policy optimization (arXiv 2507.18071), {recipe.num_generations} completions per state"


GRPO = RoundAlgorithm(GRPORecipe, Objective(advantages, loss), writer, _describe)
GSPO = RoundAlgorithm(
    GSPORecipe, Objective(advantages, gspo_loss, level="sequence"), writer, _describe_gspo
)
