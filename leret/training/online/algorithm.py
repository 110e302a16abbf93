"""Algorithms that sample in rounds: the policy in training, the objective of one that writes, the table's entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from leret.config.training import RoundRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.core.types import Task
from leret.rollouts.environment import training_tasks
from leret.training.model import InitialPolicy, find_initial, find_picker
from leret.training.process import n_processes, refuse_processes

if TYPE_CHECKING:
    from torch import Tensor

    from leret.rollouts.environment import Environment
    from leret.rollouts.rounds import LivePolicy, Sampled
    from leret.training.checkpoints import TrainingJob
    from leret.training.driver import Engine
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


@dataclass(frozen=True, slots=True)
class OnlineAlgorithm:
    """An algorithm on fresh samples of the run's tasks."""

    settings: type[RoundRecipe]
    objective: Any  # an Objective, or the class of a `leret.training.online.picking.Method`
    describe: Callable[[Any], str]
    picks: bool = False

    is_online: ClassVar[bool] = True

    def find_initial(self, run: Run, recipe: RoundRecipe) -> InitialPolicy:
        if not self.picks:
            return find_initial(run, recipe.init_from, recipe.predictors)
        return find_picker(run, recipe)

    def learner(self, *arguments: Any) -> Learner:
        """Return the policy in training; arguments are those of `WriterLearner` and `PickLearner`."""
        if self.picks:
            from leret.training.online.picking import PickLearner

            return PickLearner(self.objective, *arguments)
        from leret.training.online.writing import WriterLearner

        return WriterLearner(self.objective, *arguments)

    def inputs(self, recipe: RoundRecipe, run: Run, environment: Environment) -> list[Task]:
        return training_tasks(environment, recipe)

    @contextmanager
    def engine(self, job: TrainingJob, device: str) -> Iterator[Engine]:
        recipe: Any = job.recipe
        if job.run is None:
            raise TrainingError(
                f"algorithm: {recipe.algorithm} samples a run's tasks afresh; for examples: sft, dpo, ipo"
            )
        if recipe.uses_trl:
            from leret.training.online.trl import trl_engine

            with trl_engine(job, device) as engine:
                yield engine
            return
        if n_processes() > 1:
            refuse_processes(recipe)
        from leret.training.online.loop import RoundLoop

        with closing(RoundLoop(job, self.learner, device)) as loop:
            yield loop
