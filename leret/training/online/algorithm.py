"""Base class of algorithms that sample in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from leret.config.training import RoundRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.core.types import Task
from leret.rollouts.environment import training_tasks
from leret.training.model import InitialPolicy, find_initial, find_picker, find_tinker
from leret.training.processes import gather, n_processes, refuse_processes, start_processes

if TYPE_CHECKING:
    from leret.rollouts.environment import Environment
    from leret.training.driver import Engine
    from leret.training.job import TrainingJob
    from leret.training.online.joint import JointLearner
    from leret.training.online.picking import PickLearner
    from leret.training.online.writing import WriterLearner


@dataclass(frozen=True, slots=True)
class OnlineAlgorithm:
    """An algorithm that trains on fresh samples of the run's tasks.

    ``picks`` is True if it trains a picker.
    """

    settings: type[RoundRecipe]
    objective: Any  # an Objective, or the class of a `leret.training.online.picking.Method`
    describe: Callable[[Any], str]
    picks: bool = False

    is_online: ClassVar[bool] = True

    def find_initial(self, run: Run, recipe: Any) -> InitialPolicy:
        if recipe.uses_tinker:
            return find_tinker(run, recipe)
        if not self.picks:
            return find_initial(run, recipe.init_from, recipe.predictors)
        return find_picker(run, recipe)

    def learner(self, job: TrainingJob, device: str) -> WriterLearner | PickLearner | JointLearner:
        """Return a `PickLearner` if the algorithm trains a picker, else the engine's `WriterLearner`."""
        if self.picks:
            from leret.training.online.picking import PickLearner

            return PickLearner(self.objective, job, device)
        if job.recipe.uses_tinker:
            from leret.training.online.tinker import TinkerLearner

            return TinkerLearner(self.objective, job, device)
        from leret.training.online.writing import WriterLearner

        return WriterLearner(self.objective, job, device)

    def inputs(self, recipe: Any, run: Run, environment: Environment | None) -> list[Task]:
        assert environment is not None
        return training_tasks(environment, recipe)

    @contextmanager
    def engine(self, job: TrainingJob, device: str) -> Iterator[Engine]:
        recipe: Any = job.recipe
        if job.run is None:
            raise TrainingError(
                f"algorithm: {recipe.algorithm} needs a run's tasks to sample; for stored examples "
                "use sft, dpo or ipo"
            )
        if recipe.uses_trl:
            from leret.training.online.trl import trl_engine

            with trl_engine(job, device) as engine:
                yield engine
            return
        if n_processes() > 1:
            refuse_processes(recipe)
            start_processes(device)
        from leret.training.online.loop import RoundLoop

        with closing(RoundLoop(job, self.learner, device)) as loop:
            yield loop
            gather(None)  # a launcher stops the other processes when one ends
