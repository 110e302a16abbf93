"""Credit of a sample: its step reward, the final reward, or their weighted mean.

Rewards of a group are computed from the components of its samples: the parts of the step reward by
name, ``final``, ``final.NAME`` for each part of a final reward with several parts, and ``step`` for
credit ``both``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from leret.core.errors import ConfigError
from leret.core.types import Sample
from leret.rewards import REWARDS, Reward, Scoring

PREFIX = "final."

REPORTED: Mapping[str, Reward] = {name: REWARDS[name] for name in ("recall", "ap")}
"""Measures stored with every reward.

A part of the step reward replaces the measure with the same name.
"""


@dataclass(frozen=True)
class Crediting:
    """Combines parts into rewards.

    If ``final`` is None, stored final rewards are kept unchanged.
    """

    step: Scoring
    final: Scoring | None = None
    final_weight: float = 0.5

    @property
    def functions(self) -> dict[str, Reward]:
        functions: dict[str, Reward] = dict(self.step.parts)
        for name, measure in REPORTED.items():
            functions.setdefault(name, measure)
        return functions

    @property
    def needs_group(self) -> bool:
        if self.step.needs_group:
            return True
        return self.final is not None and self.final.needs_group

    def final_components(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the components of a final reward.

        They are ``final.NAME`` per part, or ``final`` if there is one part.
        """
        if not values:
            return {}
        assert self.final is not None
        if len(self.final.parts) > 1:
            return {f"{PREFIX}{name}": value for name, value in values.items()}
        value = self.final.alone(values)
        if value is None:
            return {}
        return {"final": value}

    def rewards(self, group: Sequence[Sample], credit: str) -> list[Sample]:
        parts = [sample.components for sample in group]
        rewards = self.mixed(parts, credit, group[0].task_id)
        return [
            replace(sample, reward=reward, components=components)
            for sample, (reward, components) in zip(group, rewards, strict=True)
        ]

    def mixed(
        self, group: Sequence[Mapping[str, float]], credit: str, question_id: str
    ) -> list[tuple[float, dict[str, float]]]:
        """Return the reward and components of each sample of a state from its parts."""
        components = [dict(parts) for parts in group]
        if credit != "step" and self.final is not None and len(self.final.parts) > 1:
            self._add_final(components, self.final)
        steps: Sequence[float | None] = [None] * len(components)
        if credit != "final":
            steps = self.step.mixer(components, self.step.weights)
        weight = self.final_weight
        rewards: list[tuple[float, dict[str, float]]] = []
        for parts, step in zip(components, steps, strict=True):
            final = parts.get("final")
            if credit == "step" and step is not None:
                rewards.append((step, parts))
            elif credit == "final" and final is not None:
                rewards.append((final, parts))
            elif step is not None and final is not None:
                parts["step"] = step
                rewards.append((weight * final + (1 - weight) * step, parts))
            elif step is not None and self.final is not None:
                raise self._without_value(self.final, question_id)
            else:
                raise self._without_value(self.step, question_id)
        return rewards

    @staticmethod
    def _add_final(components: Sequence[dict[str, float]], final: Scoring) -> None:
        """Add ``final``, the mixture of the parts of the final reward, to each sample's parts."""
        by_sample: list[dict[str, float]] = []
        for parts in components:
            names = [name for name in parts if name.startswith(PREFIX)]
            by_sample.append({name.removeprefix(PREFIX): parts[name] for name in names})
        rewards = final.mixer(by_sample, final.weights)
        for parts, reward in zip(components, rewards, strict=True):
            if reward is not None:
                parts["final"] = reward

    @staticmethod
    def _without_value(reward: Scoring, question_id: str) -> ConfigError:
        return ConfigError(
            f"sampling.reward: {' + '.join(reward.parts)} has no value for question {question_id}; "
            "add the labels that it needs (relevant documents or reference answers) to the data, "
            "or set sampling.credit: final"
        )

    def regrouped(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return a state's samples, with the rewards recomputed as one group.

        Only samples that are sampled and have a reward belong to the group.
        """
        group = [sample for sample in samples if sample.reward is not None and sample.is_sampled]
        if not group:
            return list(samples)
        rewarded = self.rewards(group, credit_of(group[0]))
        by_id = {sample.id: sample for sample in rewarded}
        return [by_id.get(sample.id, sample) for sample in samples]


def credit_of(sample: Sample) -> str:
    """Return the credit of a rewarded sample: step, final or both."""
    if "final" not in sample.components:
        return "step"
    if "step" in sample.components:
        return "both"
    return "final"


def training_rewards(samples: Sequence[Sample], unparsed_reward: float | None) -> list[Sample]:
    """Return a group's rewarded samples and unparsed completions, with their rewards for training.

    If ``unparsed_reward`` is None, unparsed completions get the lowest reward in the group, but at
    most 0.
    """
    if unparsed_reward is None:
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        unparsed_reward = min([0.0, *rewards])
    priced = with_unparsed_reward(samples, unparsed_reward)
    return [sample for sample in priced if sample.is_sampled and sample.reward is not None]


def with_unparsed_reward(samples: Sequence[Sample], unparsed_reward: float | None) -> list[Sample]:
    """Give unparsed completions the reward ``unparsed_reward`` but keep their failures.

    None changes no sample.
    """
    if unparsed_reward is None:
        return list(samples)
    rewarded: list[Sample] = []
    for sample in samples:
        if sample.is_unparsed:
            rewarded.append(replace(sample, reward=unparsed_reward))
        else:
            rewarded.append(sample)
    return rewarded
