"""Algorithms that sample in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from leret.config.training import RoundRecipe
from leret.core.runs import Run
from leret.training.model import InitialPolicy, find_writer
from leret.training.processes import N_PROCESSES, gather, refuse_processes, start_processes
from leret.training.rounds.learner import Learner, Objective

if TYPE_CHECKING:
    from leret.training.driver import Engine
    from leret.training.job import TrainingJob
    from leret.training.rounds.writing import WriterLearner

O = TypeVar("O")  # noqa: E741


@dataclass(frozen=True, slots=True)
class RoundAlgorithm(Generic[O]):
    """An algorithm that trains on fresh samples of the run's tasks.

    Attributes:
        settings: recipe class.
        objective: first argument of ``learner``: an `Objective` for writing policies.
        learner: makes the learner from the objective, the job and the device.
        describe: describes a recipe and cites its source, for the model card.
        find_initial: finds the policy at the start of training.
    """

    settings: type[RoundRecipe]
    objective: O
    learner: Callable[[O, TrainingJob, str], Learner]
    describe: Callable[[Any], str]
    find_initial: Callable[[Run, Any], InitialPolicy] = find_writer

    is_online: ClassVar[bool] = True

    @contextmanager
    def engine(self, job: TrainingJob, device: str) -> Iterator[Engine]:
        if N_PROCESSES > 1:
            refuse_processes(job.recipe)
            start_processes(device)
        from leret.training.rounds.loop import RoundLoop

        with closing(RoundLoop(job, self.make_learner, device)) as loop:
            yield loop
            gather(None)  # a launcher stops the other processes when one ends

    def make_learner(self, job: TrainingJob, device: str) -> Learner:
        return self.learner(self.objective, job, device)


def writer(objective: Objective, job: TrainingJob, device: str) -> WriterLearner:
    """Return the learner of a policy that writes text, in this process."""
    from leret.training.rounds.writing import WriterLearner

    return WriterLearner(objective, job, device)
