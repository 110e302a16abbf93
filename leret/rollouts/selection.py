"""Which sample of a state goes on to the next step.

Source: LeReT, section 4.1 and its code: one state a question and step goes on. Samples that found everything end
there, unless what the program does at its end is learnt as well; the others are grouped by reward, a level is drawn
with its reward as the weight (0.5 more on the highest level), and then one of its members.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from leret.core.types import Sample, Task, digest

TOP_BONUS = 0.5
"""Added to the weight of the highest level, so that a state where nothing was found can go on as well."""

_DIGITS = 9
"""Rewards that differ by less than a rounding error are one level."""


def reward_levels(samples: Sequence[Sample]) -> list[tuple[float, list[Sample]]]:
    """Samples with a reward, grouped by it; the highest level first, members in their given order."""
    by_reward: dict[float, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            by_reward[round(sample.reward, _DIGITS)].append(sample)
    return sorted(by_reward.items(), reverse=True, key=lambda level: level[0])


def select_next(
    samples: Sequence[Sample], task: Task, seed: int, draw: str, through_solved: bool = False
) -> Sample | None:
    """The sample that goes on.

    Args:
        samples: all of one state; those without a reward are passed over.
        task: whose gold documents tell which samples are solved.
        seed: of the run.
        draw: makes the draw of every state its own.
        through_solved: solved samples go on like the others.

    Returns:
        None where every sample is solved or none has a reward.
    """
    levels = reward_levels([one for one in samples if through_solved or not task.is_solved_by(one.doc_ids)])
    if not levels:
        return None
    rng = random.Random(int(digest("next", seed, draw), 16))
    least = min(0.0, levels[-1][0])  # a weight is not negative: below zero, the lowest level weighs nothing
    weights = [reward - least + (TOP_BONUS if place == 0 else 0.0) for place, (reward, _) in enumerate(levels)]
    [(_, members)] = rng.choices(levels, weights)
    return rng.choice(members)
