"""`pick`: train a picker on several picks per state, which are compared by reward."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from leret.config.training import PickingRecipe, changed_keys
from leret.training.algorithms.preference import pair_loss
from leret.training.online.algorithm import OnlineAlgorithm

if TYPE_CHECKING:
    from torch import Tensor

    from leret.policies.pickers.picker import Picker
    from leret.training.online.picking import PickBatch


class PickRecipe(PickingRecipe):
    """Train a picker on several picks per state, which are compared by reward."""

    algorithm: Literal["pick"] = "pick"
    loss: Literal["grpo", "dpo", "ipo", "sft"] = Field(
        "grpo", description="grpo: group-relative advantages; dpo, ipo: pairs of best and other picks; sft: best picks"
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "none", description="for grpo: divide advantages by the standard deviation of the group or the round, or by 1"
    )
    epsilon: float = Field(0.2, gt=0, description="for grpo: clip range of the ratio to the sampling picker")
    entropy_coef: float = Field(0.0, ge=0, description="for grpo: weight of the entropy bonus")
    beta: float = Field(0.1, gt=0, description="for dpo and ipo: regularization toward the initial picker")

    @model_validator(mode="after")
    def _has_a_reference(self) -> PickRecipe:
        if changed_keys(self, ["beta"]) and self.loss in {"grpo", "sft"}:
            raise ValueError(f"beta is only for loss dpo or ipo, but loss is {self.loss}; remove beta or change loss")
        if self.groups == "question" and self.loss != "grpo":
            raise ValueError(
                f"loss {self.loss} compares the picks of a state; remove groups: question, or set loss: grpo"
            )
        return self


class GroupMethod:
    """Losses on groups of picks (`leret.training.online.picking.Method`)."""

    def __init__(self, recipe: PickRecipe, temperature: float) -> None:
        self.recipe, self.temperature = recipe, temperature
        self.reference: Picker | None = None

    def begin(self, picker: Picker) -> None:
        """Copy the initial picker as the reference if the loss is dpo or ipo."""
        self.reference = picker.clone() if self.recipe.loss in {"dpo", "ipo"} else None

    def sampling(self, number: int, share: float) -> tuple[float, int | None]:
        return self.temperature, None

    def prepare(self, picker: Picker, batch: PickBatch, share: float) -> tuple[PickBatch, dict[str, float]]:
        import torch

        from leret.training.online.advantages import group_relative, group_statistics
        from leret.training.online.picking import values_of

        compare, rewards = batch.comparison, batch.rewards.double()
        advantages = compare.apply(group_relative, rewards, self.recipe.scale_rewards).float()
        with torch.no_grad():
            old_logps = self._logps(values_of(self.reference or picker, batch.choices), batch)
        statistics = group_statistics(*compare.distinct(batch.rewards))
        return replace(batch, targets=advantages, old_logps=old_logps), statistics

    def losses(self, picker: Picker, batch: PickBatch) -> Tensor:
        """Return each state's loss (n_states,), which is the mean over its picks (grpo) or over its pairs of picks."""
        import torch

        from leret.training.online.losses import clipped_loss, entropy
        from leret.training.online.picking import values_of

        recipe, q = self.recipe, values_of(picker, batch.choices)
        logps = self._logps(q, batch)
        states, shares = batch.states, 1 / torch.bincount(batch.states)[batch.states]
        if recipe.loss == "grpo":
            each = clipped_loss(logps - batch.old_logps, batch.targets, recipe.epsilon)[0]
        else:
            chosen, rejected, shares = best_and_others(batch.rewards, batch.states)
            states, ahead = batch.states[chosen], logps - batch.old_logps
            each = (
                -logps[chosen]
                if recipe.loss == "sft"
                else pair_loss(recipe.loss, ahead[chosen] - ahead[rejected], recipe.beta)
            )
        losses = torch.zeros(len(q)).index_add(0, states, each * shares)
        return losses - recipe.entropy_coef * entropy(q[:, 0] / self.temperature) if recipe.entropy_coef else losses

    def after_step(self, picker: Picker) -> None:
        """Do nothing: the reference does not change."""

    def _logps(self, q: Tensor, batch: PickBatch) -> Tensor:
        """Return the log-probability of each pick, (n,)."""
        return (q[:, 0] / self.temperature).log_softmax(-1)[batch.states, batch.actions]


def best_and_others(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pair each of a group's best samples with each of the group's other samples; ``groups`` (n,) are samples' states.

    Returns:
        Indices of chosen samples, indices of rejected samples, weights; each (n_pairs,). A group's weights sum to 1.
    """
    import torch

    top = torch.full((int(groups.max()) + 1,), -math.inf, dtype=rewards.dtype).scatter_reduce(
        0, groups, rewards, "amax"
    )
    best = rewards >= top[groups] - 1e-9
    chosen, rejected = ((groups[:, None] == groups) & best[:, None] & ~best).nonzero(as_tuple=True)
    counts = torch.bincount(groups[chosen], minlength=len(top))
    return chosen, rejected, 1 / counts[groups[chosen]].to(rewards.dtype)


def _describe(recipe: PickRecipe) -> str:
    names = {
        "grpo": "group-relative advantages (arXiv 2402.03300)",
        "dpo": "direct preference optimization (arXiv 2305.18290)",
        "ipo": "identity preference optimization (arXiv 2310.12036)",
        "sft": "imitation of the best picks",
    }
    return f"{names[recipe.loss]}, {recipe.num_generations} picks per state"


PICK = OnlineAlgorithm(PickRecipe, GroupMethod, _describe, picks=True)
