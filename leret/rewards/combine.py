"""Rewards by name, and how the parts of a reward are combined into one reward per sample."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from leret.config.messages import nearest
from leret.config.sampling import MIXER_SHELF, REWARD_SHELF, WEIGHTS, PartSettings, RewardSettings
from leret.core.classes import is_path, load_function
from leret.core.errors import USER_ERRORS, ConfigError, raised
from leret.core.types import Outcome, Task
from leret.rewards.answers import ANSWERS
from leret.rewards.ranking import (
    all_found,
    ap,
    deep_recall,
    deepretrieval,
    fact_em,
    fact_f1,
    ndcg,
    of_ranking,
    recall,
    rr,
    success,
)

Reward = Callable[..., float | None]

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


_THOUGHT = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>(?:(?!</?think>).)+", re.DOTALL)


def format(outcome: Outcome, think: bool = False) -> float:
    """Return 1 if the completion parses into fields, else 0.

    With ``think``, the completion must also be one ``<think>...</think>`` followed by text. If a
    parse error ends the program, the sample gets the recipe's ``unparsed_reward`` instead of 0.
    """
    if not outcome.outputs:
        return 0.0
    if think and _THOUGHT.fullmatch(outcome.text) is None:
        return 0.0
    return 1.0


def steps(outcome: Outcome) -> float:
    """Return 1 - n, where n is the number of LM calls."""
    return 1.0 - outcome.n_steps


REWARDS: dict[str, Reward] = {
    "recall": of_ranking(recall),
    "deep_recall": deep_recall,
    "ap": of_ranking(ap),
    "rr": of_ranking(rr),
    "ndcg": of_ranking(ndcg),
    "success": of_ranking(success),
    "all_found": of_ranking(all_found),
    "fact_em": of_ranking(fact_em),
    "fact_f1": of_ranking(fact_f1),
    "deepretrieval": deepretrieval,
    **ANSWERS,
    "format": format,
    "steps": steps,
}
"""Rewards by name in recipes, samples, summaries and reports."""

_RESERVED = frozenset({"final", "step", "sampled", "q", "logp"})
"""Names of other fields of a sample."""


@runtime_checkable
class ReadsLabels(Protocol):
    """A reward that says which tasks have the labels that it needs, before it is called."""

    def applies(self, task: Task) -> bool: ...


_TOO_LARGE = 1e100  # sums and squares of larger rewards may overflow


@dataclass(frozen=True)
class Part:
    """One function of a reward, with its settings and weight."""

    name: str
    function: str | Reward  # "recall@5", "FILE.py:function" or the function
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    place: str = field(default="", compare=False)  # key in the recipe, for messages

    def __repr__(self) -> str:
        return self.name

    @property
    def source(self) -> str | None:
        """Path of a user's function; None for leret's rewards."""
        if isinstance(self.function, str) and is_path(self.function):
            return self.function
        return None

    @cached_property
    def loaded(self) -> Reward:
        """Function without its settings; ConfigError if it cannot be loaded."""
        if not isinstance(self.function, str):
            return self.function
        path = REWARD_SHELF.get(self.function, self.function)
        if is_path(path):
            return load_function(path, self.place)
        name = self.function.partition("@")[0]
        if name not in REWARDS:
            raise self._unknown(name)
        return REWARDS[name]

    @cached_property
    def bound(self) -> Reward:
        """Function with its settings applied.

        ConfigError if the function cannot be loaded or a setting is unknown.
        """
        function = self.loaded
        settings = dict(self.arguments)
        if isinstance(self.function, str) and not is_path(self.function):
            name, at, cutoff = self.function.partition("@")
            if re.fullmatch("[1-9][0-9]*", cutoff):
                settings["k"] = int(cutoff)
            if at and ("k" not in settings or "k" not in settings_of(function)):
                raise self._unknown(name)
        self._check_settings(function, settings)
        if settings:
            return partial(function, **settings)
        return function

    def _unknown(self, name: str) -> ConfigError:
        advice = (
            "add a cut-off to ranking measures (recall@10), or name your own as FILE.py:function"
        )
        names = (*REWARDS, *REWARD_SHELF)
        available = f"available: {', '.join(names)}; {advice}"
        near = nearest(name, names)
        return ConfigError(f"{self.place}: unknown measure {self.function!r}{near}; {available}")

    def _check_settings(self, function: Reward, settings: Mapping[str, Any]) -> None:
        try:
            inspect.signature(function).bind(None, **settings)
        except TypeError as error:
            names = settings_of(function)
            keys = [*names, *PartSettings.model_fields]
            unknown = next((name for name in settings if name not in keys), "")
            hint = nearest(unknown, keys) if unknown else ""
            if hint:
                raise ConfigError(f"{self.place}.{unknown}: unknown key{hint}") from error
            available = ", ".join(names) or "none"
            message = f"{self.function}: {error}; available settings: {available}"
            raise ConfigError(f"{self.place}: {message}") from error

    @property
    def depth(self) -> int:
        """Depth that `Outcome.deep` must have: the parameter ``depth``, or 0 if there is none."""
        parameter = inspect.signature(self.bound).parameters.get("depth")
        if parameter is None or not isinstance(parameter.default, int):
            return 0
        return parameter.default

    def __call__(self, outcome: Outcome) -> float | None:
        """Return the value; None if the part does not apply.

        ConfigError if it fails or the value is not finite.
        """
        function = self.bound
        question = f"question {outcome.task.id}"
        try:
            value: Any = function(outcome)
            if value is None:
                return None
            number = float(value)
        except USER_ERRORS as error:
            advice = (
                "fix the function; it should return a finite number, or None if it does not apply"
            )
            fault = f"reward {self.name} failed for {question}: {raised(error)}"
            raise ConfigError(f"{fault}; {advice}") from error
        if isinstance(value, str) or not abs(number) < _TOO_LARGE:
            advice = f"return a number of magnitude below {_TOO_LARGE:g}, or None"
            raise ConfigError(f"reward {self.name} is {value!r} for {question}; {advice}")
        return number

    def applies(self, task: Task) -> bool:
        """Return whether the task has the labels that the function needs.

        A user's function may need any label, unless it has a method ``applies``.
        """
        function = self.loaded
        if isinstance(function, ReadsLabels):
            return function.applies(task)
        if self.source is not None:
            return True
        return self(Outcome(task, prediction="")) is not None


@dataclass(frozen=True)
class Scoring:
    """A reward: parts, and a mixer that combines the parts.

    Call it to get the reward of a single outcome.
    """

    parts: Mapping[str, Part]
    mixer: Mixer = weighted_sum
    unparsed_reward: float | None = None
    """Reward if the completion does not parse; None drops the sample."""

    @property
    def needs_group(self) -> bool:
        """True if a sample's reward depends on the other samples of its state."""
        return isinstance(self.mixer, GroupMixer)

    @property
    def reads_texts(self) -> bool:
        """True if a part may read the texts of the passages."""
        if self.calls_users:
            return True
        return any(part.function in REWARD_SHELF for part in self.parts.values())

    @property
    def depth(self) -> int:
        """Maximum depth of `Outcome.deep` that the parts read; 0 if no part reads it."""
        return max(part.depth for part in self.parts.values())

    def __call__(self, outcome: Outcome) -> float | None:
        return self.alone(self.values(outcome))

    def values(self, outcome: Outcome) -> dict[str, float]:
        return values_of(self.parts, outcome)

    @property
    def calls_users(self) -> bool:
        """True if a part is a user's function."""
        return any(part.source is not None for part in self.parts.values())

    def applies(self, task: Task) -> bool:
        """Return whether any part applies to the task."""
        return any(part.applies(task) for part in self.parts.values())

    @cached_property
    def weights(self) -> dict[str, float]:
        """Weights of the parts, by name."""
        return {name: part.weight for name, part in self.parts.items()}

    def alone(self, values: Mapping[str, float]) -> float | None:
        """Return the reward of a single outcome from its parts' values.

        The weighted sum replaces a group mixer.
        """
        if self.needs_group:
            return Scoring(self.parts).alone(values)
        return self.mixer([values], self.weights)[0]


def values_of(parts: Mapping[str, Reward], outcome: Outcome) -> dict[str, float]:
    """Return an outcome's rewards by name, without those that do not apply."""
    values = {}
    for name, part in parts.items():
        value = part(outcome)
        if value is not None:
            values[name] = value
    return values


def scoring(spec: str | RewardSettings | Reward, key: str = "reward") -> Scoring:
    """Parse a reward from a name, a recipe's section, or a function.

    A function becomes a part named ``key``. ConfigError lists all unknown names and settings, each
    with its key in the recipe.
    """
    parts = _parts(spec, key)
    problems = _faults(spec, key, parts)
    if problems:
        raise ConfigError(problems)
    parts_by_name = {part.name: part for part in parts}
    if isinstance(spec, RewardSettings):
        return Scoring(parts_by_name, find_mixer(spec.mixer), spec.unparsed_reward)
    return Scoring(parts_by_name)


def faults(spec: str | RewardSettings, key: str) -> list[str]:
    """List the faults in a recipe's reward, each after its key and a colon.

    Users' functions are not loaded, so not checked.
    """
    builtin = [part for part in _parts(spec, key) if part.source is None]
    return _faults(spec, key, builtin)


def function_names(spec: str | RewardSettings) -> list[str]:
    """Return the names of the users' functions in a reward."""
    names = [part.source for part in _parts(spec, "reward") if part.source is not None]
    if isinstance(spec, RewardSettings) and is_path(spec.mixer):
        names.append(spec.mixer)
    return names


def _parts(spec: str | RewardSettings | Reward, key: str) -> list[Part]:
    if isinstance(spec, str):
        name = Path(spec).name if is_path(spec) else spec
        return [Part(name, spec, place=key)]
    if not isinstance(spec, RewardSettings):
        return [Part(key, spec, place=key)]
    parts = []
    for name, settings in spec.parts.items():
        function = settings.function or name
        place = f"{key}.parts.{name}"
        part = Part(name, function, settings.arguments, settings.weight, place)
        parts.append(part)
    return parts


def _faults(spec: str | RewardSettings | Reward, key: str, parts: Iterable[Part]) -> list[str]:
    problems: list[str] = []
    for part in parts:
        try:
            part.bound  # noqa: B018  loads and binds the function
        except ConfigError as error:
            problems += error.problems
    if isinstance(spec, RewardSettings):
        problems += _faults_of_settings(spec, key)
    return problems


def _faults_of_settings(spec: RewardSettings, key: str) -> list[str]:
    problems = []
    for name in spec.parts:
        if name in _RESERVED or name.startswith("final."):
            problems.append(f"{key}.parts.{name}: this name is reserved; choose another name")
    if not is_path(spec.mixer):
        try:
            find_mixer(spec.mixer, f"{key}.mixer")
        except ConfigError as error:
            problems += error.problems
    return problems


def settings_of(function: Reward) -> list[str]:
    """Return the names of a reward's parameters after the first (the outcome)."""
    names = list(inspect.signature(function).parameters)
    return names[1:]


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
