"""GSPO: group sequence policy optimization, which is GRPO with one ratio per completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from leret.config.training import WritingRecipe
from leret.training.algorithms.grpo import advantages
from leret.training.online.algorithm import OnlineAlgorithm
from leret.training.online.base import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from leret.training.online.update import Forward, RolloutBatch


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


def loss(recipe: GSPORecipe, batch: RolloutBatch, now: Forward, beta: float) -> dict[str, Tensor]:
    """Return the clipped surrogate loss of length-normalized ratios (arXiv 2507.18071, eq.

    5 and 7).
    """
    from leret.training.online.losses import clipped_loss
    from leret.training.online.update import penalized

    log_ratio = batch.log_ratio(now.logps).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
    losses, clipped = clipped_loss(
        log_ratio, batch.advantages[:, :1], recipe.epsilon, recipe.epsilon_high
    )
    policy = batch.sequence_mean(losses)
    return penalized(policy, recipe, batch, now, beta, "sequence") | {
        "clipped": batch.token_mean(clipped)
    }


def _describe(recipe: GSPORecipe) -> str:
    return f"group sequence policy optimization (arXiv 2507.18071), {recipe.num_generations} completions per state"


OBJECTIVE = Objective(advantages, loss, level="sequence")
GSPO = OnlineAlgorithm(GSPORecipe, OBJECTIVE, _describe)
