"""Objectives and learners: what an algorithm adds to the loop of rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from leret.rollouts.rounds import LivePolicy, Sampled
    from leret.training.model import SavedPolicy
    from leret.training.rounds.losses import Level
    from leret.training.validation import Validation


@dataclass(frozen=True, slots=True)
class Objective:
    """Two pure functions that define how a writing policy is trained.

    Attributes:
        advantages: takes the recipe, a round's samples, their `update.RolloutBatch` and the weight
            of the KL penalty. It returns the batch with ``advantages`` set, and with ``returns``
            set if the objective has values.
        loss: takes the recipe, a batch, its `update.Forward` and the weight of the KL penalty. It
            returns ``loss``, which is minimized, and other terms for the log.
        penalty: the quantity that includes the KL penalty; with ``reward``, the function `loss`
            receives weight 0.
        has_values: True if the policy has a value head, which gives a value per token.
        level: what the loss takes the probability ratio of; ``importance_clip`` weights the same
            unit.
    """

    advantages: Callable[[Any, Sampled, Any, float], Any]
    loss: Callable[[Any, Any, Any, float], dict[str, Tensor]]
    penalty: Literal["loss", "reward"] = "loss"
    has_values: bool = False
    level: Level = "token"


class TrainedActor(Protocol):
    """A policy in training; ``temperature`` applies to the next round."""

    @property
    def policy(self) -> LivePolicy: ...
    @property
    def predictors(self) -> Sequence[str] | None: ...
    @property
    def temperature(self) -> float: ...


class Learner(Protocol):
    """Updates the policies in training from a round's samples."""

    @property
    def actors(self) -> Sequence[TrainedActor]: ...

    @property
    def sampling_keys(self) -> Mapping[str, Mapping[str, Any]]:
        """The next round's keys of `leret.rollouts.actors.Role` by predictor."""
        ...

    @property
    def learning_rate(self) -> float: ...

    def learn(self, sampled: Sampled, number: int) -> dict[str, float]:
        """Update the policies from round ``number``; return metrics for the log."""
        ...

    def validate(self, validation: Validation, step: int) -> dict[str, float]: ...

    def state(self, directory: Path) -> dict[str, Any]:
        """Return the tensors of a checkpoint in ``directory``; write all other files there."""
        ...

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None: ...

    def save(self, directory: Path) -> SavedPolicy: ...
