"""PPO: a value of each token from a head on the policy, a KL penalty a token, the reward at the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from leret.training.online.algorithm import OnlineAlgorithm, writing
from leret.training.online.recipe import OnlineRecipe

if TYPE_CHECKING:
    from leret.rollouts.rounds import Sampled
    from leret.training.online.update import RolloutBatch


class PPORecipe(OnlineRecipe):
    """Proximal policy optimization; defaults are those of query augmentation, for a model of some 100M parameters."""

    learning_rates: ClassVar[tuple[float, float]] = (5e-4, 1e-6)
    kl_in_reward: ClassVar[bool] = True

    algorithm: Literal["ppo"] = "ppo"
    num_generations: PositiveInt = Field(1, description="completions a state; its group is not looked at")
    temperature: float | None = Field(0.7, gt=0, description="None: the run's")
    top_p: float | None = Field(0.9, gt=0, le=1)
    max_completion_length: PositiveInt | None = 32
    num_iterations: PositiveInt = Field(4, description="passes over the completions of a round")
    loss_type: Literal["sequence", "token", "dapo"] = "token"
    beta: float = Field(0.05, ge=0, description="of the KL penalty, which each token's reward is lowered by")
    kl_estimator: Literal["k1", "k3"] = "k1"
    gamma: float = Field(1.0, gt=0, le=1, description="discount a token")
    lam: float = Field(0.95, ge=0, le=1, description="of GAE: 0 trusts the values, 1 the rewards")
    vf_coef: float = Field(0.1, gt=0, description="weight of the values' loss")
    cliprange_value: float = Field(0.2, gt=0, description="a value counts as if it moved no further in a round")
    whiten_advantages: bool = True

    @property
    def values_loss(self) -> tuple[float, float]:
        return self.vf_coef, self.cliprange_value


def estimate(recipe: PPORecipe, sampled: Sampled, batch: RolloutBatch, beta: float) -> None:
    """An advantage and a return at each token, by GAE."""
    import torch

    from leret.training.online.advantages import lambda_returns, whiten
    from leret.training.online.losses import KL

    assert batch.values is not None
    mask, rewards = batch.mask, torch.zeros_like(batch.mask)
    if batch.reference is not None and batch.old_logps is not None:
        rewards = -beta * KL[recipe.kl_estimator](batch.old_logps, batch.reference) * mask
    last = mask.sum(1).long() - 1
    rewards[torch.arange(len(last), device=mask.device), last] += sampled.rewards.to(mask)
    batch.returns = lambda_returns(rewards, batch.values, mask, recipe.gamma, recipe.lam)
    advantages = batch.returns - batch.values * mask
    batch.advantages = whiten(advantages, mask) if recipe.whiten_advantages else advantages


def _describe(recipe: PPORecipe) -> str:
    return f"proximal policy optimization (arXiv 1707.06347) with GAE (arXiv 1506.02438), lambda {recipe.lam}"


PPO = OnlineAlgorithm(PPORecipe, writing(estimate), _describe)
