"""Parts of a training in rounds: the policy in training, and the objective of one that writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from leret.rollouts.rounds import LivePolicy, Sampled
    from leret.training.validation import Validation


class Learner(Protocol):
    """A policy in training, and its update by a round; temperature and learning rate are those of the next one."""

    temperature: float

    @property
    def policy(self) -> LivePolicy: ...

    @property
    def learning_rate(self) -> float: ...

    def learn(self, sampled: Sampled, number: int) -> dict[str, float]:
        """Update by a round; return the figures of its log entry."""
        ...

    def validate(self, validation: Validation, step: int) -> dict[str, float]: ...

    def state(self, directory: Path) -> dict[str, Any]:
        """Return all that the next update depends on, or write it as files of a checkpoint."""
        ...

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None: ...

    def save(self, directory: Path) -> tuple[str, str]:
        """Write the trained policy; return its base and its library, for the model card."""
        ...


@dataclass(frozen=True, slots=True)
class Objective:
    """Two pure functions that define the training of a policy that writes.

    Attributes:
        advantages: takes the recipe, a round's samples, their `update.RolloutBatch` and the weight of the KL penalty;
            returns the batch with advantages (and returns, if there are values).
        loss: takes the recipe, a batch, the policy's `update.Forward` at its tokens and the weight of the KL penalty;
            returns ``loss``, which is minimized, and terms for the log.
        penalty: place of the KL penalty; in the reward, the weight that the loss gets is 0.
        has_values: True for a value of each token, from a head on the policy.
    """

    advantages: Callable[[Any, Sampled, Any, float], Any]
    loss: Callable[[Any, Any, Any, float], dict[str, Tensor]]
    penalty: Literal["loss", "reward"] = "loss"
    has_values: bool = False
