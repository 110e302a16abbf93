"""What makes an algorithm on fresh samples, and what it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from leret.config.training import RoundRecipe

if TYPE_CHECKING:
    from leret.rollouts.rounds import LivePolicy, Sampled
    from leret.training.validation import Validation


class Learner(Protocol):
    """What is trained, and how a round updates it.

    Attributes:
        policy: samples the rounds.
        temperature: of the next round.
        learning_rate: of the next step.
    """

    temperature: float

    @property
    def policy(self) -> LivePolicy: ...

    @property
    def learning_rate(self) -> float: ...
    def learn(self, sampled: Sampled, number: int) -> dict[str, float]:
        """Update by a round; returns the figures of its log entry."""
        ...

    def validate(self, validation: Validation, step: int) -> dict[str, float]: ...

    def state(self, directory: Path) -> dict[str, Any]:
        """All that the next update depends on, as tensors and plain values, or in files of a checkpoint."""
        ...

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        """Go on from there."""

    def save(self, directory: Path) -> tuple[str, str]:
        """Write what was trained; returns its base's name and the library that loads it, for the model card."""
        ...


@dataclass(frozen=True, slots=True)
class OnlineAlgorithm:
    """One way to train on fresh samples.

    Attributes:
        settings: its recipe class, whose ``algorithm`` is a literal: the name in recipes.
        learner: makes a `Learner` of a recipe, an `InitialPolicy`, an `Environment`, a number of tasks and a device.
        describe: for the model card: what it is, with its source.
    """

    settings: type[RoundRecipe]
    learner: Callable[..., Learner]
    describe: Callable[[Any], str]


def writing(estimate: Callable[[Any, Any, Any, float], None]) -> Callable[..., Learner]:
    """The learner of a policy that writes.

    Args:
        estimate: fills in ``advantages``, and ``returns`` where there are values, of a `RolloutBatch`; gets the recipe,
            what was `Sampled`, the batch, and the weight of the KL penalty in the reward.
    """

    def make(*given: Any) -> Learner:
        from leret.training.online.writing import WritingLearner

        return WritingLearner(estimate, *given)

    return make
