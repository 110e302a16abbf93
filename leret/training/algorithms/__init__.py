"""The algorithms of `leret train`. To add one: its file, with an `Algorithm`, and its line in this table."""

from leret.config.training import TrainingRecipe
from leret.training.algorithms import preference, sft
from leret.training.algorithms.base import Algorithm, register

ALGORITHMS: dict[str, Algorithm] = register(
    sft.SFT,
    preference.DPO,
    preference.IPO,
)

__all__ = ["ALGORITHMS", "Algorithm", "TrainingRecipe", "register"]
