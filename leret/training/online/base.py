"""The objective of a training in rounds of a policy that writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from leret.rollouts.rounds import Sampled


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
