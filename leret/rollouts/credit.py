"""Credit of a sample: its step reward, the final reward, their weighted mean, or the return from its step on.

Rewards of a group are computed from the components of its samples: the parts of the step reward by name, ``final``,
``final.NAME`` for each part of a final reward with several parts, ``step`` for credit ``both``, and ``return``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from leret.core.errors import ConfigError
from leret.core.types import Outcome, Sample
from leret.rewards import REWARDS, Reward, Scoring

PREFIX = "final."

REPORTED: Mapping[str, Reward] = {name: REWARDS[name] for name in ("recall", "ap")}
"""Measures stored with every reward. A part of the step reward replaces the measure with the same name."""


@dataclass(frozen=True)
class Crediting:
    """Combines parts into rewards. If ``final`` is None, stored final rewards are kept unchanged."""

    step: Scoring
    final: Scoring | None = None
    final_weight: float = 0.5

    @property
    def functions(self) -> dict[str, Reward]:
        return {
            **self.step.parts,
            **{name: one for name, one in REPORTED.items() if name not in self.step.parts},
        }

    @property
    def needs_group(self) -> bool:
        return self.step.needs_group or (self.final is not None and self.final.needs_group)

    def final_components(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return components for a final reward: ``final.NAME`` per part, or ``final`` if there is one part."""
        assert self.final is not None
        if len(self.final.parts) > 1:
            return {f"{PREFIX}{name}": value for name, value in values.items()}
        value = self.final.alone(values)
        return {} if value is None else {"final": value}

    def discounted_return(self, outcomes: Sequence[Outcome | None], gamma: float) -> float:
        """Return the first outcome's step reward plus the discounted increases of the step reward after it.

        ``outcomes`` are those of a sample's step and of the steps that follow; None (unparsed) counts as 0. The result
        is the first step reward if ``gamma`` is 0 and the last if it is 1. A group mixer becomes a weighted sum.
        """
        rewards = list[float]()
        for outcome in outcomes:
            value = None if outcome is None else self.step(outcome)
            if outcome is not None and value is None:
                raise self._without_value(self.step, outcome.task.id)
            rewards.append(value or 0.0)
        increases = enumerate(pairwise(rewards), start=1)
        return rewards[0] + sum(gamma**n * (after - before) for n, (before, after) in increases)

    def rewards(self, group: Sequence[Sample], credit: str) -> list[Sample]:
        rewards = self.mixed([sample.components for sample in group], credit, group[0].task_id)
        pairs = zip(group, rewards, strict=True)
        return [
            replace(sample, reward=reward, components=components)
            for sample, (reward, components) in pairs
        ]

    def mixed(
        self, group: Sequence[Mapping[str, float]], credit: str, question_id: str
    ) -> list[tuple[float, dict[str, float]]]:
        """Return the reward and components of each sample of a state, given the parts of each sample."""
        values = [dict(parts) for parts in group]
        if credit == "return":
            return [(one["return"], one) for one in values]
        if credit != "step" and self.final is not None and len(self.final.parts) > 1:
            named = [
                {n.removeprefix(PREFIX): v for n, v in one.items() if n.startswith(PREFIX)}
                for one in values
            ]
            finals = self.final.mix(named)
            values = [
                one | ({} if f is None else {"final": f})
                for one, f in zip(values, finals, strict=True)
            ]
        steps = self.step.mix(values) if credit != "final" else [None] * len(values)
        weight, rewards = self.final_weight, list[tuple[float, dict[str, float]]]()
        for one, step in zip(values, steps, strict=True):
            final = one.get("final")
            if credit == "step" and step is not None:
                rewards.append((step, one))
            elif credit == "final" and final is not None:
                rewards.append((final, one))
            elif step is not None and final is not None:
                rewards.append((weight * final + (1 - weight) * step, {**one, "step": step}))
            else:
                raise self._without_value(
                    self.final if step is not None and self.final else self.step, question_id
                )
        return rewards

    @staticmethod
    def _without_value(reward: Scoring, question_id: str) -> ConfigError:
        return ConfigError(
            f"sampling.reward: {' + '.join(reward.parts)} has no value for question {question_id}; add the labels that "
            "it needs (relevant documents or reference answers) to the data, or set sampling.credit: final"
        )

    def regrouped(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return a state's samples, with the rewards of its sampled and rewarded ones recomputed as one group."""
        group = [sample for sample in samples if sample.reward is not None and sample.is_sampled]
        if not group:
            return list(samples)
        known = {sample.id: sample for sample in self.rewards(group, credit_of(group[0]))}
        return [known.get(sample.id, sample) for sample in samples]


def credit_of(sample: Sample) -> str:
    """Return the credit of a rewarded sample: step, final, both or return."""
    if "return" in sample.components:
        return "return"
    return (
        "step"
        if "final" not in sample.components
        else "both"
        if "step" in sample.components
        else "final"
    )


def training_rewards(
    samples: Sequence[Sample], unparsed_reward: float | None
) -> list[tuple[Sample, float]]:
    """Return a group's samples for training with their rewards: those with a reward, and unparsed completions.

    If ``unparsed_reward`` is None, unparsed completions get the lowest reward in the group, but at most 0.
    """
    known = [sample.reward for sample in samples if sample.reward is not None]
    least = min([0.0, *known]) if unparsed_reward is None else unparsed_reward
    valid = [
        one for one in samples if one.is_sampled and (one.reward is not None or one.is_unparsed)
    ]
    return [(one, least if one.reward is None else one.reward) for one in valid]


def with_unparsed_reward(samples: Sequence[Sample], unparsed_reward: float | None) -> list[Sample]:
    """Give unparsed completions the reward ``unparsed_reward`` but keep their failures; None changes no sample."""
    if unparsed_reward is None:
        return list(samples)
    return [
        replace(sample, reward=unparsed_reward) if sample.is_unparsed else sample
        for sample in samples
    ]
