"""RLOO: REINFORCE with the mean of a state's other completions as the baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from leret.config.training import WritingRecipe
from leret.training.rounds.algorithm import RoundAlgorithm, writer
from leret.training.rounds.learner import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from leret.rollouts.rounds import Sampled
    from leret.training.rounds.update import Forward, RolloutBatch


class RLOORecipe(WritingRecipe):
    """REINFORCE leave-one-out; the reward includes the KL penalty, and ratios are per completion."""

    algorithm: Literal["rloo"] = "rloo"
    engine: Literal["leret"] = "leret"
    beta: float = Field(
        0.05, ge=0, description="weight of the KL penalty (summed over tokens) in the reward"
    )
    kl_estimator: Literal["k1", "k3"] = "k1"


def advantages(
    recipe: RLOORecipe, sampled: Sampled, batch: RolloutBatch, beta: float
) -> RolloutBatch:
    """Set a completion's advantages to its penalized reward minus the mean of the group's others."""
    from leret.training.rounds.advantages import Comparison, leave_one_out
    from leret.training.rounds.losses import KL

    comparison = Comparison.of(sampled)
    rewards = sampled.rewards.double().to(batch.mask.device)
    if batch.reference is not None and batch.old_logps is not None:
        kl = KL[recipe.kl_estimator](batch.old_logps, batch.reference) * batch.mask
        rewards = rewards - beta * comparison.totals(kl.sum(1))
    values = comparison.apply(leave_one_out, rewards)
    return replace(batch, advantages=values.to(batch.mask)[:, None] * batch.mask)


def loss(recipe: RLOORecipe, batch: RolloutBatch, now: Forward, beta: float) -> dict[str, Tensor]:
    """Return the clipped surrogate loss of completion ratios (arXiv 2402.14740, section 3)."""
    from leret.training.rounds.losses import clipped_loss
    from leret.training.rounds.update import penalized

    log_ratio = batch.log_ratio(now.logps).sum(1, keepdim=True)
    losses, clipped = clipped_loss(
        log_ratio, batch.advantages[:, :1], recipe.epsilon, recipe.epsilon_high
    )
    policy = batch.sequence_mean(losses)
    return penalized(policy, recipe, batch, now, beta, "dapo") | {
        "clipped": batch.token_mean(clipped)
    }


def _describe(recipe: RLOORecipe) -> str:
    return f"REINFORCE leave-one-out (arXiv 2402.14740), {recipe.num_generations} completions per state"


OBJECTIVE = Objective(advantages, loss, penalty="reward", level="sequence")
RLOO = RoundAlgorithm(RLOORecipe, OBJECTIVE, writer, _describe)
