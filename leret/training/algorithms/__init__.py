"""Algorithms of `leret train`: some train on stored samples, others on fresh samples of the run's tasks.

To add an algorithm, define its entry in a new file and add the entry to this table.
"""

from leret.config.training import TrainingRecipe
from leret.training.algorithms import (
    grpo,
    gspo,
    joint,
    kto,
    pick,
    ppo,
    pqn,
    preference,
    retriever_kl,
    rloo,
    sft,
)
from leret.training.algorithms.base import StoredAlgorithm
from leret.training.algorithms.retriever_kl import RetrieverAlgorithm
from leret.training.online.algorithm import OnlineAlgorithm

Algorithm = StoredAlgorithm | OnlineAlgorithm | RetrieverAlgorithm

ALGORITHMS: dict[str, Algorithm] = {
    "sft": sft.SFT,
    "dpo": preference.DPO,
    "ipo": preference.IPO,
    "kto": kto.KTO,
    "grpo": grpo.GRPO,
    "gspo": gspo.GSPO,
    "rloo": rloo.RLOO,
    "ppo": ppo.PPO,
    "pqn": pqn.PQN,
    "pick": pick.PICK,
    "retriever-kl": retriever_kl.RETRIEVER_KL,
    "joint": joint.JOINT,
}
TrainingRecipe.table = ALGORITHMS

__all__ = ["ALGORITHMS", "Algorithm", "TrainingRecipe"]
