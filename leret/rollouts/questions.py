"""Whole rollouts of one question (``groups: question``).

Every turn gets the reward of its rollout's outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from leret.core.types import Sample, State, digest, seed_of
from leret.programs.needs import NeedsCompletion
from leret.programs.prompts import ZERO_SHOT
from leret.rollouts.failures import unparsed
from leret.rollouts.walk import Point, Walk

if TYPE_CHECKING:
    from leret.programs.runner import ProgramRunner
    from leret.rollouts.actors import SamplingPlan
    from leret.rollouts.states import StateSampler


async def sample_question(
    runner: ProgramRunner,
    sampler: StateSampler,
    plan: SamplingPlan,
    start: Point,
    unparsed_reward: float | None,
) -> list[tuple[State, list[Sample]]]:
    """Run a task ``plan.n_samples`` times to its end, and return all turns, grouped by state.

    ``Sample.index`` is the number of the rollout. If a rollout does not parse, its turns get
    ``unparsed_reward`` (None: 0 or the question's lowest reward, whichever is lower). If an outage
    ends a rollout, its turns have no reward.
    """
    assert plan.final is not None
    paths = await sampler.walks.gather(
        sampler.run_on(start, "rollout", start.task.id, index) for index in range(plan.n_samples)
    )
    parts: dict[int, dict[str, float]] = {}
    for index, path in enumerate(paths):
        if path.error is None and not path.end.unparsed:
            parts[index] = await sampler.end_values(path)
    rewards: dict[int, float] = {}
    if parts:
        mixed = plan.final.mixer([*parts.values()], plan.final.weights)
        for index, reward in zip(parts, mixed, strict=True):
            if reward is not None:
                rewards[index] = reward
    if unparsed_reward is None:
        unparsed_reward = min([0.0, *rewards.values()])
    groups: dict[str, tuple[State, list[Sample]]] = {}
    for index, path in enumerate(paths):
        reward = None
        if path.error is None:
            reward = rewards.get(index, unparsed_reward)
        components = sampler.crediting.final_components(parts.get(index, {}))
        for state, sample in _turns(runner, plan, path, index, reward, components):
            groups.setdefault(state.id, (state, []))[1].append(sample)
    return list(groups.values())


def _turns(
    runner: ProgramRunner,
    plan: SamplingPlan,
    path: Walk,
    index: int,
    reward: float | None,
    parts: Mapping[str, float],
) -> Iterator[tuple[State, Sample]]:
    """Yield the state and the sample of each sampled turn.

    A failure of the rollout is its last turn's failure.
    """
    steps = path.points[-1].steps
    for n, point in enumerate(path.points):
        if not isinstance(point.need, NeedsCompletion) or not plan.role_of(point.need).sampled:
            continue
        state = runner.state(point.task, point.need, n)
        # the seed of `StateSampler.run_on`
        seed = seed_of(plan.seed, "rollout", point.task.id, index, n)
        text = None
        failure = None
        if n < len(steps):
            text = steps[n].text
        else:
            failure = path.failure
        if path.error is None and path.end.unparsed and n == len(steps) - 1:
            failure = unparsed(runner.formatter, point.need.predictor, text or "")
        sample = Sample(
            digest(state.id, n, index, seed),
            state.id,
            point.task.id,
            n,
            ZERO_SHOT.name,
            index,
            seed,
            text,
            reward=reward,
            components=parts,
            failure=failure,
        )
        yield state, sample
