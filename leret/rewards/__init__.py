"""What an outcome is worth: one table of plain functions for sampling, the prompt bank and evaluation.

A reward takes an `Outcome` and gives any real number, or None where it does not apply (a ranking without gold
documents, say). One with a parameter ``k`` takes a cut-off: ``recall@5`` is ``recall`` with ``k=5``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from leret.core.errors import ConfigError
from leret.rewards import ranking
from leret.rewards.ranking import of_ranking

__all__ = ["REWARDS", "Reward", "reward"]

Reward = Callable[..., float | None]
"""Takes an `Outcome`, and perhaps a cut-off `k`."""

REWARDS: dict[str, Reward] = {
    "recall": of_ranking(ranking.recall),
    "ap": of_ranking(ranking.ap),
    "rr": of_ranking(ranking.rr),
    "ndcg": of_ranking(ranking.ndcg),
    "success": of_ranking(ranking.success),
    "all_found": of_ranking(ranking.all_found),
}
"""Rewards by their names in recipes, samples, summaries and reports."""


def reward(name: str, key: str = "") -> Reward:
    """A reward by its name: ``ap`` or, with a cut-off, ``recall@10``; else a ConfigError, with the recipe's ``key``."""
    base, at, cut = name.partition("@")
    found = REWARDS.get(base)
    takes_cut = found is not None and "k" in inspect.signature(found).parameters
    if found is None or (at and not (takes_cut and cut.isascii() and cut.isdecimal() and int(cut) > 0)):
        place = f"{key}: " if key else ""
        raise ConfigError(
            f"{place}unknown measure {name!r}; available: {', '.join(REWARDS)}; "
            "those of a ranking also with a cut-off, as in recall@10"
        )
    return partial(found, k=int(cut)) if at else found
