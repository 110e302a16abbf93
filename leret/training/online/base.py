"""Objectives for training a writing policy in rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from leret.rollouts.rounds import Sampled
    from leret.training.online.losses import Level


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
