"""Rewards for the format and the number of steps, and DeepRetrieval's tiers of recall."""

from __future__ import annotations

import re

from leret.core.types import Outcome
from leret.rewards.ranking import of_ranking, recall

_THOUGHT = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>(?:(?!</?think>).)+", re.DOTALL)

TIERS = ((0.7, 5.0), (0.5, 4.0), (0.4, 3.0), (0.3, 1.0), (0.1, 0.5), (0.05, 0.1))
"""Least recall and reward of each tier; below all of them, the reward is `WORST`."""
WORST = -3.5

_recall = of_ranking(recall)


def format(outcome: Outcome, think: bool = False) -> float:
    """Return 1 if the completion parses into fields, else 0.

    A sample that does not parse has no reward except the recipe's ``unparsed_reward``, so 0 only occurs in programs
    that continue anyway. With ``think``, the completion must also begin with one ``<think>...</think>`` and continue.
    """
    return float(bool(outcome.outputs) and (not think or _THOUGHT.fullmatch(outcome.text) is not None))


def steps(outcome: Outcome) -> float:
    """Return 0 for one LM call, and 1 less for each further call."""
    return 1.0 - outcome.n_steps


def deepretrieval(outcome: Outcome, k: int | None = None) -> float | None:
    """Return recall in tiers: 5 from .7 on, 4 from .5, 3 from .4, 1 from .3, .5 from .1, .1 from .05, and -3.5 below.

    Source: DeepRetrieval (arXiv 2503.00223), literature search, as in its code. Its rewards for the format (+1, -4) are
    the part `format` and the key ``unparsed_reward`` of a recipe.
    """
    value = _recall(outcome, k)
    return None if value is None else next((reward for least, reward in TIERS if value >= least), WORST)
