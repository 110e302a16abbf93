"""Choosing the sample that continues a path.

Source: LeReT, section 4.1 and its code. Solved samples do not continue unless training uses the
final reward. The other samples are grouped by reward. A group is drawn, weighted by reward (plus
0.5 for the highest), then a sample of it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from leret.core.types import Sample, Task, digest

TOP_BONUS = 0.5
"""Extra weight of the highest reward, so that a state without a reward above 0 can continue too."""

_DIGITS = 9  # rewards are rounded to these digits, so that rounding errors do not split a level


def reward_levels(samples: Sequence[Sample]) -> list[tuple[float, list[Sample]]]:
    """Group samples by reward, highest reward first; samples keep their order within a group."""
    by_reward: dict[float, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            by_reward[round(sample.reward, _DIGITS)].append(sample)
    return sorted(by_reward.items(), reverse=True, key=lambda level: level[0])


def select_next(
    samples: Sequence[Sample], task: Task, seed: int, draw: str, through_solved: bool = False
) -> Sample | None:
    """Return the sample that continues the path.

    None if all samples are solved or none has a reward. ``draw`` is the state's key for the random
    draw; ``through_solved`` lets solved samples continue too.
    """
    if not through_solved:
        samples = [sample for sample in samples if not task.is_solved_by(sample.doc_ids)]
    levels = reward_levels(samples)
    if not levels:
        return None
    rng = random.Random(int(digest("next", seed, draw), 16))
    # weights must not be negative: if the lowest reward is below 0, its weight is 0
    least = min(0.0, levels[-1][0])
    weights = [reward - least for reward, _ in levels]
    weights[0] += TOP_BONUS
    [(_, members)] = rng.choices(levels, weights)
    return rng.choice(members)
