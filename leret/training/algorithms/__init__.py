"""The algorithms of `leret train`. To add one: its file, with an `Algorithm`, and its line in this table."""

from leret.config.training import TrainingRecipe
from leret.training.algorithms import kto, preference, sft
from leret.training.algorithms.base import Algorithm

ALGORITHMS = {
    "sft": sft.SFT,
    "dpo": preference.DPO,
    "ipo": preference.IPO,
    "kto": kto.KTO,
}
TrainingRecipe.table = ALGORITHMS

__all__ = ["ALGORITHMS", "Algorithm", "TrainingRecipe"]
