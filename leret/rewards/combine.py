"""Mixers: combine the parts of a group's rewards into one reward per sample.

`weighted_sum` is the default. `leret.extras.mixers` has more; a recipe names them, or your own, by
path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from leret.config.sampling import MIXER_SHELF, WEIGHTS
from leret.core.classes import is_path, load_function
from leret.core.errors import ConfigError

Mixer = Callable[[Sequence[Mapping[str, float]], Mapping[str, float]], Sequence[float | None]]
"""Maps the parts of a state's samples by name, and the weights of the parts, to rewards.

A sample lacks the parts that do not apply to it. Its reward is None if no part applies.
"""


@dataclass(frozen=True)
class GroupMixer:
    """A mixer for which a sample's reward depends on the other samples of its state.

    The reward of a single outcome, in the prompt bank for example, is the weighted sum.
    """

    mix: Mixer

    def __call__(
        self, group: Sequence[Mapping[str, float]], weights: Mapping[str, float]
    ) -> Sequence[float | None]:
        return self.mix(group, weights)


def weighted_sum(
    group: Sequence[Mapping[str, float]], weights: Mapping[str, float]
) -> list[float | None]:
    """Return the weighted sums of the parts that apply.

    >>> weighted_sum([{"ap": 0.5, "format": 1.0}, {}], {"ap": 2.0, "format": 0.5})
    [1.5, None]
    """
    rewards: list[float | None] = []
    for values in group:
        terms = [weight * values[name] for name, weight in weights.items() if name in values]
        rewards.append(sum(terms) if terms else None)
    return rewards


def find_mixer(name: str, place: str = "mixer") -> Mixer:
    """Return the mixer with a short name or at a path; a ConfigError begins with ``place``."""
    if name == WEIGHTS:
        return weighted_sum
    path = MIXER_SHELF.get(name, name)
    if not is_path(path):
        available = ", ".join((WEIGHTS, *MIXER_SHELF))
        raise ConfigError(
            f"{place}: unknown mixer {name!r}; available: {available}, "
            "or name your own as FILE.py:function"
        )
    mixer: Mixer = load_function(path, place)
    return mixer
