"""Algorithms of `leret train`: some train on stored samples, others on fresh samples of the run's tasks.

To add an algorithm, define its entry in a new file and add the entry to this table, or name the entry
by path (``algorithm: FILE.py:NAME``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from leret.config.training import TrainingRecipe
from leret.core.runs import Run
from leret.training.model import InitialPolicy
from leret.training.picks.joint import JOINT
from leret.training.picks.pick import PICK
from leret.training.picks.pqn import PQN
from leret.training.rounds.distill import DISTILL
from leret.training.rounds.grpo import GRPO, GSPO
from leret.training.rounds.ppo import PPO
from leret.training.rounds.rloo import RLOO
from leret.training.stored.kto import KTO
from leret.training.stored.preference import DPO, IPO
from leret.training.stored.sft import SFT

if TYPE_CHECKING:
    from leret.training.driver import Engine
    from leret.training.job import TrainingJob


class Algorithm(Protocol):
    """A way of learning.

    Attributes:
        settings: recipe class.
        is_online: True if it trains on the run's tasks, False if it has a method ``inputs``.
        describe: describes a recipe and cites its source, for the model card.
        find_initial: finds the policy at the start of training.
    """

    @property
    def settings(self) -> type[TrainingRecipe]: ...
    @property
    def is_online(self) -> bool: ...
    @property
    def describe(self) -> Callable[[Any], str]: ...
    @property
    def find_initial(self) -> Callable[[Run, Any], InitialPolicy]: ...

    def engine(self, job: TrainingJob, device: str) -> AbstractContextManager[Engine]:
        """Return a context with the engine that trains a job."""
        ...


ALGORITHMS: dict[str, Algorithm] = {
    "sft": SFT,
    "dpo": DPO,
    "ipo": IPO,
    "kto": KTO,
    "grpo": GRPO,
    "gspo": GSPO,
    "rloo": RLOO,
    "ppo": PPO,
    "distill": DISTILL,
    "pqn": PQN,
    "pick": PICK,
    "joint": JOINT,
}
TrainingRecipe.table = ALGORITHMS
TrainingRecipe.shelf = {"retriever-kl": "leret.extras.retriever_kl:RETRIEVER_KL"}
TrainingRecipe.engines = {
    "trl": "leret.extras.trl:ENGINE",
    "tinker": "leret.extras.tinker_training:ENGINE",
    "keep-rollouts": "leret.extras.keep_rollouts:ENGINE",
}


__all__ = ["ALGORITHMS", "Algorithm", "TrainingRecipe"]
