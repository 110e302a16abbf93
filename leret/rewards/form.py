"""What an outcome is worth by its form: its format, its steps; and DeepRetrieval's tiers of recall."""

from __future__ import annotations

import re

from leret.core.types import Outcome
from leret.rewards.ranking import of_ranking, recall

_THOUGHT = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>(?:(?!</?think>).)+", re.DOTALL)

TIERS = ((0.7, 5.0), (0.5, 4.0), (0.4, 3.0), (0.3, 1.0), (0.1, 0.5), (0.05, 0.1))
"""Least recall, and what it is worth; less than all of them is worth `WORST`."""
WORST = -3.5

_recall = of_ranking(recall)


def format(outcome: Outcome, think: bool = False) -> float:
    """1 where the completion was parsed into fields, else 0.

    A sample whose completion does not parse has no reward, but the price ``unparsed_reward`` where the recipe names
    one; 0 is of programs that go on all the same. ``think``: the completion also has to begin with one
    ``<think>...</think>`` and have something after it.
    """
    return float(bool(outcome.outputs) and (not think or _THOUGHT.fullmatch(outcome.text) is not None))


def steps(outcome: Outcome) -> float:
    """0 for one LM call, and 1 less for each one more."""
    return 1.0 - outcome.n_steps


def deepretrieval(outcome: Outcome, k: int | None = None) -> float | None:
    """Recall in tiers: 5 from .7 on, 4 from .5, 3 from .4, 1 from .3, .5 from .1, .1 from .05, and -3.5 below.

    Source: DeepRetrieval (arXiv 2503.00223), literature search, as in its code; what it gives for the format beside
    it (+1, or -4) is the part `format` and the price ``unparsed_reward`` of a recipe.
    """
    found = _recall(outcome, k)
    return None if found is None else next((worth for least, worth in TIERS if found >= least), WORST)
