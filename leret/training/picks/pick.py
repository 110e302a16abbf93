"""`pick`: train a picker on several picks per state, which are compared by reward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from leret.config.training import PickingRecipe, changed_keys
from leret.training.model import find_picker
from leret.training.rounds.algorithm import RoundAlgorithm

if TYPE_CHECKING:
    from torch import Tensor

    from leret.policies.pickers.picker import Picker
    from leret.training.job import TrainingJob
    from leret.training.picks.picking import Method, PickBatch, PickLearner


class PickRecipe(PickingRecipe):
    """Train a picker on several picks per state, which are compared by reward."""

    algorithm: Literal["pick"] = "pick"
    loss: Literal["grpo", "kl"] = Field(
        "grpo", description="grpo: group-relative advantages; kl: softmax of rewards"
    )
    reward_temperature: float = Field(0.1, gt=0, description="for kl: divides the rewards")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "none",
        description="for grpo: divide advantages by the standard deviation of the group or the round, or by 1",
    )
    epsilon: float = Field(
        0.2, gt=0, description="for grpo: clip range of the ratio to the sampling picker"
    )
    entropy_coef: float = Field(0.0, ge=0, description="for grpo: weight of the entropy bonus")
    beta: float | None = Field(
        None,
        ge=0,
        description="for grpo: weight of the exact KL to the initial picker; None: 0",
    )

    @model_validator(mode="after")
    def _reads_each_key(self) -> PickRecipe:
        unread_keys = ["reward_temperature"]
        if self.loss == "kl":
            unread_keys = ["scale_rewards", "epsilon", "entropy_coef", "beta"]
        unread = changed_keys(self, unread_keys)
        if unread:
            raise ValueError(
                f"loss {self.loss} does not read {' or '.join(unread)}; remove it, or change loss"
            )
        if self.groups == "question" and self.loss == "kl":
            raise ValueError(
                "loss kl compares the picks of a state; remove groups: question, or set loss: grpo"
            )
        return self


class GroupMethod:
    """Losses on groups of picks (`leret.training.picks.picking.Method`)."""

    def __init__(self, recipe: PickRecipe, temperature: float) -> None:
        self.recipe = recipe
        self.temperature = temperature
        self.reference: Picker | None = None

    def begin(self, picker: Picker) -> None:
        """Copy the initial picker as the reference if the loss reads one."""
        self.reference = picker.clone() if self.recipe.beta else None

    def sampling(self, number: int, share: float) -> tuple[float, int | None]:
        return self.temperature, None

    def prepare(
        self, picker: Picker, batch: PickBatch, share: float
    ) -> tuple[PickBatch, dict[str, float]]:
        import torch

        from leret.training.picks.picking import values_of
        from leret.training.rounds.advantages import group_relative, group_statistics

        compare = batch.comparison
        rewards = batch.rewards.double()
        advantages = compare.apply(group_relative, rewards, self.recipe.scale_rewards)
        with torch.no_grad():
            old_logps = self._logps(values_of(picker, batch.choices), batch)
        statistics = group_statistics(*compare.distinct(batch.rewards))
        return replace(batch, targets=advantages.float(), old_logps=old_logps), statistics

    def losses(self, picker: Picker, batch: PickBatch) -> dict[str, Tensor]:
        """Return each state's ``loss``: a mean over picks (grpo), or the KL divergence (kl).

        For grpo, also return ``ratio`` (mean over the picks) and, with a reference, ``kl`` to the
        initial picker.
        """
        from leret.training.picks.picking import values_of

        q = values_of(picker, batch.choices)
        if self.recipe.loss == "kl":
            return {"loss": self._reward_kl(q, batch)}
        return self._grpo_terms(q, batch)

    def _reward_kl(self, q: Tensor, batch: PickBatch) -> Tensor:
        """Return the divergence over a state's distinct picks, each with its mean reward."""
        import torch

        n_states, _, width = q.shape
        index = batch.states * width + batch.actions
        means = torch.full((n_states * width,), -math.inf)
        means = means.scatter_reduce(0, index, batch.rewards, "mean", include_self=False)
        means = means.reshape(n_states, width)
        logits = self._logits(q).masked_fill(means.isinf(), -math.inf)
        return exact_kl(means / self.recipe.reward_temperature, logits)

    def _grpo_terms(self, q: Tensor, batch: PickBatch) -> dict[str, Tensor]:
        import torch

        from leret.training.picks.picking import values_of
        from leret.training.rounds.losses import clipped_loss, entropy

        recipe = self.recipe
        states = batch.states
        log_ratio = self._logps(q, batch) - batch.old_logps
        shares = 1 / torch.bincount(states)[states]
        clipped, _ = clipped_loss(log_ratio, batch.targets, recipe.epsilon)
        zeros = torch.zeros(len(q))
        losses = zeros.index_add(0, states, clipped * shares)
        ratio = log_ratio.detach().exp()
        terms = {"ratio": zeros.index_add(0, states, ratio * shares)}
        if self.reference is not None and recipe.beta is not None:
            with torch.no_grad():
                initial = values_of(self.reference, batch.choices)
            terms["kl"] = exact_kl(self._logits(q), self._logits(initial))
            losses = losses + recipe.beta * terms["kl"]
        if recipe.entropy_coef:
            losses = losses - recipe.entropy_coef * entropy(self._logits(q))
        return {"loss": losses, **terms}

    def after_step(self, picker: Picker) -> None:
        """Do nothing: the reference does not change."""

    def _logits(self, q: Tensor) -> Tensor:
        return q[:, 0] / self.temperature

    def _logps(self, q: Tensor, batch: PickBatch) -> Tensor:
        """Return the log-probability of each pick, (n,)."""
        logps = self._logits(q).log_softmax(-1)
        return logps[batch.states, batch.actions]


def exact_kl(logits: Tensor, reference: Tensor) -> Tensor:
    """Return KL(softmax of logits || softmax of reference) in nats, (n,), of (n, n_candidates).

    Padding is minus infinity in both.
    """
    logps = logits.log_softmax(-1)
    difference = logps - reference.log_softmax(-1)
    difference = difference.masked_fill(logits.isinf(), 0.0)
    return (logps.exp() * difference).sum(-1)


def picker(method: Callable[[Any, float], Method], job: TrainingJob, device: str) -> PickLearner:
    """Return the learner of a policy that picks."""
    from leret.training.picks.picking import PickLearner

    return PickLearner(method, job, device)


def _describe(recipe: PickRecipe) -> str:
    names = {
        "grpo": "group-relative advantages (arXiv 2402.03300)",
        "kl": "KL divergence from the softmax of rewards, as for retrievers in arXiv 2301.12652 and 2406.18847",
    }
    text = f"{names[recipe.loss]}, {recipe.num_generations} picks per state"
    if recipe.beta:
        text += f", exact KL penalty {recipe.beta:g}"
    return text


PICK = RoundAlgorithm(PickRecipe, GroupMethod, picker, _describe, find_picker)
