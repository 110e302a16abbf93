"""RLOO: REINFORCE with the mean of the other completions of a state as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leret.training.online.algorithm import OnlineAlgorithm, writing
from leret.training.online.recipe import TwoEngines

if TYPE_CHECKING:
    from leret.rollouts.rounds import Sampled
    from leret.training.online.update import RolloutBatch


class RLOORecipe(TwoEngines):
    """REINFORCE leave-one-out; the KL penalty is part of the reward, and the ratio is that of whole completions."""

    kl_in_reward: ClassVar[bool] = True
    sequence_ratio: ClassVar[bool] = True

    algorithm: Literal["rloo"] = "rloo"
    beta: float = Field(0.05, ge=0, description="of the KL penalty, a sum over tokens, which the reward is lowered by")
    kl_estimator: Literal["k1", "k3"] = "k1"


def estimate(recipe: RLOORecipe, sampled: Sampled, batch: RolloutBatch, beta: float) -> None:
    """The same advantage at all tokens of a completion: its reward less KL, beside the others'."""
    from leret.training.online.advantages import leave_one_out
    from leret.training.online.losses import KL

    rewards = sampled.rewards.double().to(batch.mask.device)
    if batch.reference is not None and batch.old_logps is not None:
        kl = KL[recipe.kl_estimator](batch.old_logps, batch.reference) * batch.mask
        rewards = rewards - beta * kl.sum(1)
    batch.advantages = leave_one_out(rewards, batch.groups).to(batch.mask)[:, None] * batch.mask


def _describe(recipe: RLOORecipe) -> str:
    return f"REINFORCE leave-one-out (arXiv 2402.14740), {recipe.num_generations} completions a state"


RLOO = OnlineAlgorithm(RLOORecipe, writing(estimate), _describe)
