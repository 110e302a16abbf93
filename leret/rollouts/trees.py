"""Trees of picks: each pick of a state is continued and gets the reward of its continuation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

from leret.core.types import Sample, State
from leret.rollouts.credit import training_rewards
from leret.rollouts.facts import Group
from leret.rollouts.states import StateSampler
from leret.rollouts.walk import Point


async def sample_tree(
    sampler: StateSampler,
    point: Point,
    state: State,
    follow: Callable[[Awaitable[Point]], Coroutine[Any, Any, list[Group]]],
    unparsed_reward: float | None,
) -> list[Group]:
    """Draw picks at a state and follow each distinct pick once.

    Return the groups of the state and of all branches. A pick's reward is the mean reward of the
    samples at the next state that is sampled. The replies that reward a pick are therefore also the
    group that trains the writer. ``follow`` samples a point's state and those after it. If an
    outage ends a branch before there is a reward, its picks have no reward.
    """
    picks = await sampler.draw(point, state)
    first: dict[str, Sample] = {}
    for pick in picks:
        if pick.completion is not None:
            first.setdefault(pick.completion, pick)
    groups = await sampler.walks.gather(
        follow(sampler.next_point(point, pick)) for pick in first.values()
    )
    branches = dict(zip(first, groups, strict=True))
    worth = {text: _worth(groups, unparsed_reward) for text, groups in branches.items()}
    rewarded = [replace(pick, **worth.get(pick.completion or "", {})) for pick in picks]
    return [(state, rewarded), *chain.from_iterable(branches.values())]


def _worth(groups: Sequence[Group], unparsed_reward: float | None) -> dict[str, Any]:
    """Return the reward and the components of a pick; empty if no sample after it has a reward."""
    rewarded: list[Sample] = []
    for _, samples in groups:
        if any(sample.is_sampled for sample in samples):
            rewarded = training_rewards(samples, unparsed_reward)
            break
    if not rewarded:
        return {}
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in rewarded:
        for name, value in sample.components.items():
            if name.startswith("final"):
                parts[name].append(value)
    components = {name: fmean(values) for name, values in parts.items()}
    reward = fmean(sample.reward or 0.0 for sample in rewarded)
    return {"reward": reward, "components": components}
