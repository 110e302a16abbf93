"""PPO: with a value head, a KL penalty on each token, and the reward on the last token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from leret.config.training import WritingRecipe
from leret.training.rounds.algorithm import RoundAlgorithm, writer
from leret.training.rounds.learner import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from leret.rollouts.rounds import Sampled
    from leret.training.rounds.update import Forward, RolloutBatch


class PPORecipe(WritingRecipe):
    """Proximal policy optimization; defaults suit query augmentation with a model of about 100M parameters."""

    learning_rates: ClassVar[Mapping[float, float]] = {1.5e6: 5e-4, 1e9: 1e-6}

    algorithm: Literal["ppo"] = "ppo"
    num_generations: PositiveInt = Field(
        1, description="completions per state; PPO does not compare completions"
    )
    temperature: float | None = Field(0.7, gt=0, description="None: the run's temperature")
    top_p: float | None = Field(0.9, gt=0, le=1)
    max_completion_length: PositiveInt | None = 32
    num_iterations: PositiveInt = Field(4, description="passes over the completions of a round")
    loss_type: Literal["sequence", "token", "dapo"] = "token"
    beta: float = Field(
        0.05, ge=0, description="strength of the KL penalty in the reward of each token"
    )
    kl_estimator: Literal["k1", "k3"] = "k1"
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(
        0.95, ge=0, le=1, description="lambda of GAE: 0 trusts the values, 1 the rewards"
    )
    vf_coef: float = Field(0.1, gt=0, description="weight of the value loss")
    cliprange_value: float = Field(
        0.2, gt=0, description="maximum change of a value within a round"
    )
    whiten_advantages: bool = True


def advantages(
    recipe: PPORecipe, sampled: Sampled, batch: RolloutBatch, beta: float
) -> RolloutBatch:
    """Compute the advantage and return of each token with GAE (arXiv 1506.02438)."""
    import torch

    from leret.training.rounds.advantages import lambda_returns, whiten
    from leret.training.rounds.losses import KL

    assert batch.values is not None
    mask = batch.mask
    rewards = torch.zeros_like(batch.mask)
    if batch.reference is not None and batch.old_logps is not None:
        rewards = -beta * KL[recipe.kl_estimator](batch.old_logps, batch.reference) * mask
    last = mask.sum(1).long() - 1
    rewards[torch.arange(len(last), device=mask.device), last] += sampled.rewards.to(mask)
    returns = lambda_returns(rewards, batch.values, mask, recipe.gamma, recipe.lam)
    values = returns - batch.values * mask
    return replace(
        batch,
        returns=returns,
        advantages=whiten(values, mask) if recipe.whiten_advantages else values,
    )


def loss(recipe: PPORecipe, batch: RolloutBatch, now: Forward, beta: float) -> dict[str, Tensor]:
    """Return the clipped surrogate loss and the value loss (arXiv 1707.06347, eq. 9)."""
    from leret.training.rounds.losses import clipped_loss, value_loss
    from leret.training.rounds.update import penalized

    assert now.values is not None
    assert batch.values is not None
    assert batch.returns is not None
    losses, clipped = clipped_loss(
        batch.log_ratio(now.logps), batch.advantages, recipe.epsilon, recipe.epsilon_high
    )
    policy = batch.mean(losses, recipe.loss_type)
    terms = penalized(policy, recipe, batch, now, beta, recipe.loss_type)
    error = batch.token_mean(
        value_loss(now.values, batch.values, batch.returns, recipe.cliprange_value)
    )
    clips = batch.token_mean(clipped)
    return terms | {
        "loss": terms["loss"] + recipe.vf_coef * error,
        "value_loss": error,
        "clipped": clips,
    }


def _describe(recipe: PPORecipe) -> str:
    return f"proximal policy optimization (arXiv 1707.06347) with GAE (arXiv 1506.02438), lambda {recipe.lam}"


OBJECTIVE = Objective(advantages, loss, penalty="reward", has_values=True)
PPO = RoundAlgorithm(PPORecipe, OBJECTIVE, writer, _describe)
