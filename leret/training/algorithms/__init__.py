"""The algorithms of `leret train`: on stored examples (`Algorithm`), or on fresh samples (`OnlineAlgorithm`).

To add one: its file, with its record, and its line in this table.
"""

from leret.config.training import TrainingRecipe
from leret.training.algorithms import grpo, kto, picking, ppo, preference, rloo, sft
from leret.training.algorithms.base import Algorithm
from leret.training.online.algorithm import OnlineAlgorithm

ALGORITHMS: dict[str, Algorithm | OnlineAlgorithm] = {
    "sft": sft.SFT,
    "dpo": preference.DPO,
    "ipo": preference.IPO,
    "kto": kto.KTO,
    "grpo": grpo.GRPO,
    "rloo": rloo.RLOO,
    "ppo": ppo.PPO,
    "pqn": picking.PQN,
    "pick": picking.PICK,
}
TrainingRecipe.table = ALGORITHMS

__all__ = ["ALGORITHMS", "Algorithm", "OnlineAlgorithm", "TrainingRecipe"]
