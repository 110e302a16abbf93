"""From what a sample led to, to its reward: of its step, of the program's end, or of both.

Everything that a reward is computed from is kept in a sample's components: the parts of the step's reward by their
names; ``final``, and its parts as ``final.NAME`` where there are several; ``step`` where both count. So a group's
rewards follow from its components alone: sampling mixes them so, and so does `leret rescore`, with other parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from leret.core.errors import ConfigError
from leret.core.types import Sample
from leret.rewards import REWARDS, Reward, Scoring

PREFIX = "final."
"""Of the components that are parts of the final reward."""

REPORTED: Mapping[str, Reward] = {name: REWARDS[name] for name in ("recall", "ap")}
"""Measures that are stored beside the reward; a part of the step's reward may take the name of one."""


@dataclass(frozen=True)
class Crediting:
    """How parts become rewards.

    Attributes:
        step: the reward of a step.
        final: of the program's end; None where there is none, or where its value stays as it is.
        final_weight: of the final reward where both count, 0 to 1.
    """

    step: Scoring
    final: Scoring | None = None
    final_weight: float = 0.5

    @property
    def functions(self) -> dict[str, Reward]:
        """The parts of the step's reward, and the reported measures that none of them is named like."""
        return {**self.step.parts, **{name: one for name, one in REPORTED.items() if name not in self.step.parts}}

    @property
    def needs_group(self) -> bool:
        """Whether a sample's reward depends on the others of its state."""
        return self.step.needs_group or (self.final is not None and self.final.needs_group)

    def final_components(self, values: Mapping[str, float]) -> dict[str, float]:
        """The parts of a final reward as components: all of them under their names, or the only one as ``final``."""
        assert self.final is not None
        if len(self.final.parts) > 1:
            return {f"{PREFIX}{name}": value for name, value in values.items()}
        value = self.final.alone(values)
        return {} if value is None else {"final": value}

    def rewards(self, group: Sequence[Sample], credit: str) -> list[Sample]:
        """Samples of one state with a reward each, as `mixed` makes it."""
        made = self.mixed([sample.components for sample in group], credit, group[0].task_id)
        pairs = zip(group, made, strict=True)
        return [replace(sample, reward=reward, components=components) for sample, (reward, components) in pairs]

    def mixed(
        self, group: Sequence[Mapping[str, float]], credit: str, question_id: str
    ) -> list[tuple[float, dict[str, float]]]:
        """The reward, and all components, of each sample of one state, by its parts; all led to an outcome.

        ``credit`` is step, final or both. A reward that depends on the group is right where all of the group is given.
        """
        values = [dict(own) for own in group]
        if credit != "step" and self.final is not None and len(self.final.parts) > 1:
            named = [{n.removeprefix(PREFIX): v for n, v in own.items() if n.startswith(PREFIX)} for own in values]
            finals = self.final.mix(named)
            values = [own | ({} if f is None else {"final": f}) for own, f in zip(values, finals, strict=True)]
        steps = self.step.mix(values) if credit != "final" else [None] * len(values)
        return [self._rewarded(*one, credit, question_id) for one in zip(values, steps, strict=True)]

    def _rewarded(
        self, values: dict[str, float], step: float | None, credit: str, question_id: str
    ) -> tuple[float, dict[str, float]]:
        final = values.get("final")
        if credit == "step" and step is not None:
            return step, values
        if credit == "final" and final is not None:
            return final, values
        if step is None or final is None:
            name = " + ".join((self.final if step is not None and self.final else self.step).parts)
            raise ConfigError(
                f"sampling.reward: {name} has no value for question {question_id}; give the data what it is "
                "computed from (relevant documents, reference answers), or use credit final"
            )
        return self.final_weight * final + (1 - self.final_weight) * step, {**values, "step": step}

    def regrouped(self, samples: Sequence[Sample]) -> list[Sample]:
        """All samples of a state, with the rewards that those with a reward have as one group."""
        group = [sample for sample in samples if sample.reward is not None and sample.is_sampled]
        if not group:
            return list(samples)
        known = {sample.id: sample for sample in self.rewards(group, credit_of(group[0]))}
        return [known.get(sample.id, sample) for sample in samples]


def credit_of(sample: Sample) -> str:
    """What scored a sample with a reward: step, final or both."""
    return "step" if "final" not in sample.components else "both" if "step" in sample.components else "final"


def with_unparsed_reward(samples: Sequence[Sample], unparsed_reward: float | None) -> list[Sample]:
    """Samples with the price of a completion that does not parse as the reward of those that do not.

    They keep their failure. Outages, and prompts that do not fit the policy, have no price.
    """
    if unparsed_reward is None:
        return list(samples)
    return [
        replace(sample, reward=unparsed_reward)
        if sample.failure is not None and sample.failure.kind == "parse"
        else sample
        for sample in samples
    ]
