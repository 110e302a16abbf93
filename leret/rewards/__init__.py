"""Rewards: plain functions for sampling, the prompt bank, training and evaluation.

A reward maps an `Outcome` to a real number, or to None if the reward does not apply (``recall`` for
a task without gold documents, for example). A recipe sets the function's other parameters. A
parameter ``k`` can also be set in the name: ``recall@5`` is ``recall`` with ``k=5``. Name your own
function as ``module:function`` or ``file.py:function``. leret imports the module or runs the file,
so use only code you trust.
"""

from leret.rewards.combine import (
    REWARDS,
    Part,
    Reward,
    Scoring,
    faults,
    function_names,
    scoring,
    settings_of,
    values_of,
)

__all__ = [
    "REWARDS",
    "Part",
    "Reward",
    "Scoring",
    "faults",
    "function_names",
    "scoring",
    "settings_of",
    "values_of",
]
