"""How a picker learns from a round: from several picks at one state, or from whole trajectories.

Source: of trajectories, Q-RAG, arXiv 2511.07328, and PQN, arXiv 2407.04811.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from leret.policies.pickers.picker import Picker
from leret.training.algorithms.preference import pair_loss
from leret.training.online.advantages import group_relative, lambda_returns, spread
from leret.training.online.losses import clipped_loss, entropy
from leret.training.picking.learner import PickBatch, values_of
from leret.training.picking.losses import as_table, best_and_others, soft_value
from leret.training.picking.recipe import PickRecipe, PQNRecipe

_UNIFORM = 1e9
"""A temperature at which every candidate is as likely as another."""


class GroupMethod:
    """The losses of ``algorithm: pick``."""

    def __init__(self, recipe: PickRecipe, temperature: float) -> None:
        self.recipe, self.temperature = recipe, temperature
        self.fellow: Picker | None = None

    def begin(self, picker: Picker) -> None:
        """Keep the initial picker, the reference of pairs."""
        self.fellow = picker.clone() if self.recipe.loss in {"dpo", "ipo"} else None

    def draws(self, number: int, share: float) -> tuple[float, int | None]:
        return self.temperature, None

    def prepare(self, picker: Picker, batch: PickBatch, share: float) -> tuple[PickBatch, dict[str, float]]:
        advantages = group_relative(batch.rewards.double(), batch.states, self.recipe.scale_rewards).float()
        with torch.no_grad():
            before = self._logps(values_of(self.fellow or picker, batch.choices), batch)
        return replace(batch, targets=advantages, before=before), spread(batch.rewards, batch.states)

    def losses(self, picker: Picker, batch: PickBatch) -> Tensor:
        """(n_states,), each the mean over a state's picks, or over its pairs of a best pick and another."""
        recipe, q = self.recipe, values_of(picker, batch.choices)
        logps = self._logps(q, batch)
        whose, shares = batch.states, 1 / torch.bincount(batch.states)[batch.states]
        if recipe.loss == "grpo":
            given = logps[:, None], batch.before[:, None], batch.targets[:, None], torch.ones(len(logps), 1)
            each = clipped_loss(*given, recipe.epsilon, recipe.epsilon, sequence=False)[0][:, 0]
        else:
            chosen, rejected, shares = best_and_others(batch.rewards, batch.states)
            whose, ahead = batch.states[chosen], logps - batch.before
            each = (
                -logps[chosen]
                if recipe.loss == "sft"
                else pair_loss(recipe.loss, ahead[chosen] - ahead[rejected], recipe.beta)
            )
        losses = torch.zeros(len(q)).index_add(0, whose, each * shares)
        return losses - recipe.entropy_coef * entropy(q[:, 0] / self.temperature) if recipe.entropy_coef else losses

    def after(self, picker: Picker) -> None:
        """The reference stays."""

    def _logps(self, q: Tensor, batch: PickBatch) -> Tensor:
        return (q[:, 0] / self.temperature).log_softmax(-1)[batch.states, batch.actions]


class ValueMethod:
    """The losses of ``algorithm: pqn``; the fellow is the target network."""

    def __init__(self, recipe: PQNRecipe, temperature: float) -> None:
        self.recipe, self.temperature = recipe, temperature
        self.fellow: Picker | None = None

    def begin(self, picker: Picker) -> None:
        """Where each step moves all of it, the target network is the picker itself."""
        self.fellow = picker.clone() if self.recipe.tau < 1 else None

    def draws(self, number: int, share: float) -> tuple[float, int | None]:
        """At random at first, then softly among the best."""
        random = number < self.recipe.learning_starts
        return (_UNIFORM, None) if random else (self.temperature * share, self.recipe.top_k)

    def prepare(self, picker: Picker, batch: PickBatch, share: float) -> tuple[PickBatch, dict[str, float]]:
        recipe = self.recipe
        with torch.no_grad():
            q = values_of(self.fellow or picker, batch.choices, self.recipe.twin)
        values = soft_value(q, self.temperature * share * recipe.soft_value, recipe.top_k).mean(1)
        rewards, mask = as_table(batch.gains, batch.walks)
        returns = lambda_returns(rewards, as_table(values, batch.walks)[0], mask.float(), recipe.gamma, recipe.lam)
        last = as_table(batch.rewards, batch.walks)[0].gather(1, mask.sum(1, keepdim=True) - 1)
        entry = {"reward": float(last.mean()), "value": float(values.mean()), "alpha": self.temperature * share}
        return replace(batch, targets=returns[mask]), entry

    def losses(self, picker: Picker, batch: PickBatch) -> Tensor:
        """(n_states,) squared errors, the mean over heads; only what was picked is encoded."""
        q = torch.stack(picker.q(batch.choices, self.recipe.twin, batch.actions.tolist())).flatten(1).cpu()
        return ((q - batch.targets[:, None]) ** 2).mean(1)

    def after(self, picker: Picker) -> None:
        if self.fellow is not None:
            with torch.no_grad():
                for target, weight in zip(self.fellow.model.parameters(), picker.model.parameters(), strict=True):
                    target.lerp_(weight, self.recipe.tau)
            self.fellow.renew(picker.digest)
