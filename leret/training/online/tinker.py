"""Online training on a server of the Tinker API: leret's advantages and losses, and the server's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from leret.core.errors import TrainingError
from leret.rollouts.rounds import Sampled
from leret.training.job import TrainingJob
from leret.training.online.base import Objective
from leret.training.online.losses import KLController
from leret.training.online.update import Forward, RolloutBatch
from leret.training.online.writing import WriterLearner
from leret.training.tinker import TinkerAdapter
from leret.training.validation import Validation


class TinkerUpdate:
    """Takes optimizer steps on a server; it has the methods of `leret.training.online.update.Update` that rounds need.

    The API's losses sum ``-ratio * advantage`` over tokens (``ppo`` clips the ratio). The advantages sent to
    them are minus the gradient of leret's loss with respect to the log-probabilities, at the sampler's. There, both
    losses have the same gradient with respect to the weights.
    """

    device = torch.device("cpu")

    def __init__(self, adapter: TinkerAdapter, recipe: Any, objective: Objective) -> None:
        self._adapter, self._recipe, self._objective = adapter, recipe, objective
        self.reference = adapter if recipe.beta else None

    def evaluate(self, batch: RolloutBatch, *, reference: bool = False) -> tuple[Tensor, None]:
        """Return each token's log-probability under the initial policy."""
        return _table(self._adapter.initial_logps(batch.sequences), batch), None

    def step(self, batch: RolloutBatch, beta: float = 0.0, round_tokens: float | None = None) -> dict[str, float]:
        """Take one optimizer step; return leret's loss and its terms, from the server's log-probabilities."""
        recipe, counted = self._recipe, batch.counted(round_tokens, bool(beta))
        if counted is None or counted.old_logps is None:
            return {}

        def terms(logps: list[Tensor]) -> dict[str, Tensor]:
            return self._objective.loss(recipe, counted, Forward(torch.empty(0), _table(logps, counted), None), beta)

        at = [row[: len(ids)] for row, (_, ids) in zip(counted.old_logps, counted.sequences, strict=True)]
        if recipe.num_iterations * recipe.num_mini_batches == 1:
            return self._adapter.step(counted.sequences, terms, "importance_sampling", at)
        high = recipe.epsilon if recipe.epsilon_high is None else recipe.epsilon_high
        bounds = {"clip_low_threshold": 1 - recipe.epsilon, "clip_high_threshold": 1 + high}
        return self._adapter.step(counted.sequences, terms, "ppo", at, **bounds)


def _table(logps: list[Tensor], batch: RolloutBatch) -> Tensor:
    return pad_sequence(logps, batch_first=True).to(batch.mask)


class TinkerLearner(WriterLearner):
    """Trains a writing policy on a server; the log-probabilities before an update are those of the sampler."""

    update: Any
    policy: Any

    def __init__(self, objective: Objective, job: TrainingJob, device: str) -> None:
        assert job.environment is not None
        recipe: Any = job.recipe
        sampled = job.environment.recipe.policy_of(recipe.predictors)
        self.temperature, top_p = recipe.temperature or sampled.temperature, recipe.top_p or sampled.top_p
        if (self.temperature, top_p) != (1, 1):
            raise TrainingError(
                f"temperature {self.temperature:g}, top_p {top_p:g}: engine: tinker computes log-probabilities for "
                "temperature 1 and top_p 1; set both to 1"
            )
        self.recipe, self.objective, self.actors = recipe, objective, (self,)
        self.adapter = TinkerAdapter(sampled, job.initial, recipe, recipe.n_steps(len(job.inputs)))
        self.policy, self._schedule = self.adapter.policy, self.adapter.schedule
        self.update = TinkerUpdate(self.adapter, recipe, objective)
        self.kl = KLController(recipe.beta, recipe.target_kl, recipe.kl_horizon)

    def validate(self, validation: Validation, step: int) -> dict[str, float]:
        return self.adapter.validate(validation, step)

    def state(self, directory: Path) -> dict[str, Any]:
        return {**self.adapter.state(directory), "kl_coef": self.kl.coefficient}

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        self.adapter.load_state(state, directory)
        self.kl.coefficient = state["kl_coef"]

    def save(self, directory: Path) -> tuple[str, str]:
        return self.adapter.save(directory)

    def _batch(self, sampled: Sampled) -> RolloutBatch:
        batch = RolloutBatch.of(sampled.sequences, sampled.groups)
        return replace(batch, old_logps=_table([torch.tensor(row) for row in sampled.logps], batch))
