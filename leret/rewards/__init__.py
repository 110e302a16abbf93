"""What an outcome is worth: one table of plain functions for sampling, the prompt bank, training and evaluation.

A reward takes an `Outcome` and gives any real number, or None where it does not apply (a ranking without gold
documents, say). Its other parameters are keys of a recipe; one with a parameter ``k`` takes a cut-off also in its name:
``recall@5`` is ``recall`` with ``k=5``. A function of the user's own is named ``module:function`` or
``file.py:function``: its module is imported, or the file is run, so name what you trust.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from leret.config.sampling import RewardSettings
from leret.core.errors import USER_ERRORS, ConfigError, raised
from leret.core.types import Outcome
from leret.rewards import form, ranking
from leret.rewards.answers import ANSWERS
from leret.rewards.combine import MIXERS, OF_GROUP, mix
from leret.rewards.functions import is_function, load_function
from leret.rewards.ranking import of_ranking

__all__ = ["REWARDS", "Reward", "Scoring", "faults", "function_names", "names", "reward", "scoring", "values_of"]

Reward = Callable[..., float | None]
"""Takes an `Outcome`, and perhaps a cut-off `k` and other settings."""

REWARDS: dict[str, Reward] = {
    "recall": of_ranking(ranking.recall),
    "ap": of_ranking(ranking.ap),
    "rr": of_ranking(ranking.rr),
    "ndcg": of_ranking(ranking.ndcg),
    "success": of_ranking(ranking.success),
    "all_found": of_ranking(ranking.all_found),
    "fact_em": of_ranking(ranking.fact_em),
    "fact_f1": of_ranking(ranking.fact_f1),
    "deepretrieval": form.deepretrieval,
    **ANSWERS,
    "format": form.format,
    "steps": form.steps,
}
"""Rewards by their names in recipes, samples, summaries and reports."""

_TAKEN = frozenset({"final", "step", "sampled", "q", "logp"})
"""Components of a sample that are no parts of its reward."""

_TOO_LARGE = 1e100
"""A reward's magnitude from which its sums and squares may overflow."""


@dataclass(frozen=True)
class Scoring:
    """A reward with its parts: what each is worth, and how they make one number.

    Attributes:
        parts: by their names in samples.
        weights: of the parts, in their order.
        mixer: of `leret.rewards.combine`.
        unparsed_reward: price of a completion that does not parse; None: such a sample is left out.
    """

    parts: Mapping[str, Reward]
    weights: tuple[float, ...]
    mixer: str = "weights"
    unparsed_reward: float | None = None

    @property
    def needs_group(self) -> bool:
        """Whether the reward of a sample depends on the others of its state."""
        return self.mixer in OF_GROUP

    def values(self, outcome: Outcome) -> dict[str, float]:
        """The parts that apply to an outcome, by name."""
        return values_of(self.parts, outcome)

    def mix(self, group: Sequence[Mapping[str, float]]) -> list[float | None]:
        """The rewards of a group, of the parts of each of its samples; None where no part applies."""
        if len(self.parts) == 1 and self.mixer == "weights":  # 20 times as fast as a matrix of one column
            [name], [weight] = self.parts, self.weights
            return [weight * values[name] if name in values else None for values in group]
        rows = [[values.get(name, np.nan) for name in self.parts] for values in group]
        mixed = mix(self.mixer, np.array(rows, dtype=float), np.array(self.weights))
        return [None if np.isnan(value) else float(value) for value in mixed]

    def alone(self, values: Mapping[str, float]) -> float | None:
        """The reward of a single outcome, of its parts; a mixer of groups is the sum by weights here."""
        single = Scoring(self.parts, self.weights) if self.needs_group else self
        return single.mix([values])[0]


def values_of(parts: Mapping[str, Reward], outcome: Outcome) -> dict[str, float]:
    """Return the rewards that apply to an outcome, by name; ConfigError if one fails or is not a finite number."""
    values, question = dict[str, float](), f"question {outcome.task.id}"
    for name, part in parts.items():
        try:
            value: Any = part(outcome)
            number = math.nan if value is None else float(value)
        except USER_ERRORS as error:
            raise ConfigError(
                f"reward {name} failed for {question}: {raised(error)}; correct the function, which returns a finite "
                "number, or None where it does not apply"
            ) from error
        if value is None:
            continue
        if isinstance(value, str) or not abs(number) < _TOO_LARGE:
            told = f"return a finite number (below {_TOO_LARGE:g}), or None"
            raise ConfigError(f"reward {name} is {value!r} for {question}; {told}")
        values[name] = number
    return values


def reward(spec: str | RewardSettings | Reward, key: str = "") -> Reward:
    """A reward as a function of one outcome; arguments as of `scoring`.

    By its name it is the function itself: ``ap``; with a cut-off ``recall@10``; the user's own ``rewards.py:score``.
    """
    if isinstance(spec, str):
        function = _named(spec, key)
        return (lambda outcome: values_of({spec: function}, outcome).get(spec)) if is_function(spec) else function
    if callable(spec):
        return spec
    found = scoring(spec, key)
    return lambda outcome: found.alone(found.values(outcome))


def scoring(spec: str | RewardSettings | Reward, key: str = "reward") -> Scoring:
    """A reward with its parts.

    Args:
        spec: a name, a recipe's section, or a function, whose part is called ``key``.
        key: of the recipe, for messages.

    Raises:
        ConfigError: unknown names or settings; all of them are listed.
    """
    if isinstance(spec, str):
        name = Path(spec).name if is_function(spec) else spec
        return Scoring({name: _named(spec, key)}, (1.0,))
    if callable(spec):
        return Scoring({key: spec}, (1.0,))
    if problems := list(faults(spec, key)):
        raise ConfigError(problems)
    parts = {name: _named(part.function or name, key, part.arguments) for name, part in spec.parts.items()}
    return Scoring(parts, tuple(part.weight for part in spec.parts.values()), spec.mixer, spec.unparsed_reward)


def names(spec: str | RewardSettings) -> list[str]:
    """The names of the functions in a reward."""
    return [name for _, name, _ in _parts(spec, "")]


def function_names(spec: str | RewardSettings) -> list[str]:
    """Those of the user's own."""
    return [name for name in names(spec) if is_function(name)]


def faults(spec: str | RewardSettings, key: str = "", functions: bool = True) -> Iterator[str]:
    """What is wrong with a recipe's reward; functions of the user's own are loaded for it, or passed over."""
    for place, name, arguments in _parts(spec, key):
        try:
            if functions or not is_function(name):
                _named(name, place, arguments)
        except ConfigError as error:
            yield from error.problems
    if isinstance(spec, str):
        return
    for name in spec.parts:
        if name in _TAKEN or name.startswith("final."):
            yield f"{key}.parts.{name}: samples keep something else under this name; choose another".lstrip(".")
    place = f"{key}.mixer" if key else "mixer"
    if spec.mixer not in MIXERS:
        yield f"{place}: unknown mixer {spec.mixer!r}; available: {', '.join(MIXERS)}"
    if spec.mixer == "uniform" and any(part.weight != 1 for part in spec.parts.values()):
        yield f"{place}: uniform takes all parts alike, and weights are given; leave them out, or take weights"


def _parts(spec: str | RewardSettings, key: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Each part's place in the recipe, the name of its function, and its settings."""
    if isinstance(spec, str):
        return [(key, spec, {})]
    place = f"{key}.parts" if key else "parts"
    return [(f"{place}.{name}", part.function or name, part.arguments) for name, part in spec.parts.items()]


def _named(name: str, key: str, arguments: Mapping[str, Any] | None = None) -> Reward:
    place, settings = f"{key}: " if key else "", dict(arguments or {})
    if is_function(name):
        found = load_function(name, key)
    else:
        base, _, cut = name.partition("@")
        settings |= {"k": int(cut)} if re.fullmatch("[1-9][0-9]*", cut) else {}
        if base not in REWARDS or ("@" in name and ("k" not in settings or "k" not in _settings(REWARDS[base]))):
            raise ConfigError(
                f"{place}unknown measure {name!r}; available: {', '.join(REWARDS)}; "
                "those of a ranking also with a cut-off, as in recall@10; your own as FILE.py:function"
            )
        found = REWARDS[base]
    try:
        inspect.signature(found).bind(None, **settings)
    except TypeError as error:
        known = ", ".join(_settings(found)) or "none"
        raise ConfigError(f"{place}{name}: {error}; its settings are: {known}") from error
    return partial(found, **settings) if settings else found


def _settings(function: Reward) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]
