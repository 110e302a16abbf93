"""Rewards: plain functions for sampling, the prompt bank, training and evaluation.

A reward maps an `Outcome` to a real number, or to None if the reward does not apply (``recall`` for a task without gold
documents, for example). A recipe sets the function's other parameters. A parameter ``k`` can also be set in the name:
``recall@5`` is ``recall`` with ``k=5``. Name your own function as ``module:function`` or ``file.py:function``.
leret imports the module or runs the file, so use only code you trust.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from leret.config.messages import nearest
from leret.config.sampling import PartSettings, RewardSettings
from leret.core.errors import USER_ERRORS, ConfigError, raised
from leret.core.types import Outcome, Task
from leret.rewards import likelihood, ranking
from leret.rewards.answers import ANSWERS
from leret.rewards.combine import GROUP_MIXERS, MIXERS, mix
from leret.rewards.functions import is_function, load_function
from leret.rewards.ranking import of_ranking

__all__ = [
    "REWARDS",
    "Part",
    "Reward",
    "Scoring",
    "faults",
    "function_names",
    "scoring",
    "values_of",
]

Reward = Callable[..., float | None]

_THOUGHT = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>(?:(?!</?think>).)+", re.DOTALL)
_TIERS = (
    (0.7, 5.0),
    (0.5, 4.0),
    (0.4, 3.0),
    (0.3, 1.0),
    (0.1, 0.5),
    (0.05, 0.1),
)  # minimum recall, reward


def format(outcome: Outcome, think: bool = False) -> float:
    """Return 1 if the completion parses into fields, else 0.

    With ``think``, the completion must also be one ``<think>...</think>`` followed by text. If a parse error ends the
    program, the sample gets the recipe's ``unparsed_reward`` instead of 0.
    """
    return float(
        bool(outcome.outputs) and (not think or _THOUGHT.fullmatch(outcome.text) is not None)
    )


def steps(outcome: Outcome) -> float:
    """Return 1 - n, where n is the number of LM calls."""
    return 1.0 - outcome.n_steps


def deepretrieval(outcome: Outcome, k: int | None = None) -> float | None:
    """Return a reward by recall: 5 for .7 or more, 4 for .5, 3 for .4, 1 for .3, .5 for .1, .1 for .05, else -3.5.

    Source: DeepRetrieval (arXiv 2503.00223), code for literature search. For the paper's format rewards (+1, -4), use
    the part `format` and the recipe's ``unparsed_reward``.
    """
    value = of_ranking(ranking.recall)(outcome, k)
    return (
        None
        if value is None
        else next((reward for least, reward in _TIERS if value >= least), -3.5)
    )


def deep_recall(outcome: Outcome, depth: int = 100) -> float | None:
    """Return recall with partial credit for gold documents ranked too low to be retrieved.

    A gold document at rank ``r`` among a query's new documents counts ``1 / (1 + log2(1 + r))`` (at most .5), or 0
    below rank ``depth``. Samples with equal recall thus differ in reward. Only sampling and training search to
    ``depth``; in evaluation, and at the program's end, the reward is plain recall.
    """
    task = outcome.task
    gold, known = set(task.gold), set(task.gold_ids(outcome.doc_ids))
    if not gold:
        return None
    new = [
        [doc_id for doc_id in task.gold_ids(ids[:depth]) if doc_id not in known]
        for ids in outcome.deep
    ]
    places = [{doc_id: place for place, doc_id in enumerate(ids, 1)} for ids in new]
    left = [
        min((of[one] for of in places if one in of), default=math.inf)
        for one in sorted(gold - known)
    ]
    return (len(gold & known) + sum(1 / (1 + math.log2(1 + place)) for place in left)) / len(gold)


REWARDS: dict[str, Reward] = {
    "recall": of_ranking(ranking.recall),
    "deep_recall": deep_recall,
    "ap": of_ranking(ranking.ap),
    "rr": of_ranking(ranking.rr),
    "ndcg": of_ranking(ranking.ndcg),
    "success": of_ranking(ranking.success),
    "all_found": of_ranking(ranking.all_found),
    "fact_em": of_ranking(ranking.fact_em),
    "fact_f1": of_ranking(ranking.fact_f1),
    "deepretrieval": deepretrieval,
    **ANSWERS,
    likelihood.NAME: likelihood.answer_likelihood,
    "format": format,
    "steps": steps,
}
"""Rewards by name in recipes, samples, summaries and reports."""

_RESERVED = frozenset(
    {"final", "step", "return", "sampled", "q", "logp"}
)  # names of other fields of a sample
_TOO_LARGE = 1e100  # sums and squares of larger rewards may overflow


@dataclass(frozen=True)
class Part:
    """One function of a reward, with its settings and weight."""

    name: str
    function: str | Reward  # "recall@5", "FILE.py:function" or the function
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    place: str = field(default="", compare=False)  # key in the recipe, for messages
    factor: bool = False  # multiplies the mixed reward of the other parts

    def __repr__(self) -> str:
        return self.name

    @property
    def source(self) -> str | None:
        """Name of a user's function; None for leret's rewards."""
        return (
            self.function if isinstance(self.function, str) and is_function(self.function) else None
        )

    @cached_property
    def bound(self) -> Reward:
        """Function with its settings applied. ConfigError if the function cannot be loaded or a setting is unknown."""
        if not isinstance(self.function, str):
            return self.function
        place, settings = f"{self.place}: " if self.place else "", dict(self.arguments)
        if self.source is not None:
            function = load_function(self.source, self.place)
        else:
            base, at, cutoff = self.function.partition("@")
            settings |= {"k": int(cutoff)} if re.fullmatch("[1-9][0-9]*", cutoff) else {}
            if base not in REWARDS or (
                at and not ("k" in settings and "k" in settings_of(REWARDS[base]))
            ):
                advice = "add a cut-off to ranking measures (recall@10), or name your own as FILE.py:function"
                available = f"available: {', '.join(REWARDS)}; {advice}"
                near = nearest(base, REWARDS)
                raise ConfigError(f"{place}unknown measure {self.function!r}{near}; {available}")
            function = REWARDS[base]
        try:
            inspect.signature(function).bind(None, **settings)
        except TypeError as error:
            known = [*settings_of(function), *PartSettings.model_fields]
            unknown = next((name for name in settings if name not in known), "")
            if unknown and (hint := nearest(unknown, known)):
                raise ConfigError(
                    f"{place.replace(': ', '.')}{unknown}: unknown key{hint}"
                ) from error
            available = ", ".join(settings_of(function)) or "none"
            raise ConfigError(
                f"{place}{self.function}: {error}; available settings: {available}"
            ) from error
        return partial(function, **settings) if settings else function

    @property
    def depth(self) -> int:
        """Depth that `Outcome.deep` must have: the parameter ``depth``, or 0 if the function has no such parameter."""
        parameter = inspect.signature(self.bound).parameters.get("depth")
        return (
            parameter.default if parameter is not None and isinstance(parameter.default, int) else 0
        )

    def __call__(self, outcome: Outcome) -> float | None:
        """Return the value; None if the part does not apply. ConfigError if it fails or the value is not finite."""
        function, question = self.bound, f"question {outcome.task.id}"
        try:
            value: Any = function(outcome)
            number = math.nan if value is None else float(value)
        except USER_ERRORS as error:
            advice = (
                "fix the function; it should return a finite number, or None if it does not apply"
            )
            raise ConfigError(
                f"reward {self.name} failed for {question}: {raised(error)}; {advice}"
            ) from error
        if value is None:
            return None
        if isinstance(value, str) or not abs(number) < _TOO_LARGE:
            advice = f"return a number of magnitude below {_TOO_LARGE:g}, or None"
            raise ConfigError(f"reward {self.name} is {value!r} for {question}; {advice}")
        return number

    def applies(self, task: Task) -> bool:
        """Return whether the task has the labels that the function needs. A user's function may need any label."""
        if self.source is not None or self.function == likelihood.NAME:
            return self.source is not None or bool(task.answers)
        return self(Outcome(task, prediction="")) is not None


@dataclass(frozen=True)
class Scoring:
    """A reward: parts, and a mixer that combines the parts. Call it to get the reward of a single outcome."""

    parts: Mapping[str, Part]
    mixer: str = "weights"
    unparsed_reward: float | None = (
        None  # reward if the completion does not parse; None drops the sample
    )

    @property
    def needs_group(self) -> bool:
        """True if a sample's reward depends on the other samples of its state."""
        return self.mixer in GROUP_MIXERS

    @property
    def depth(self) -> int:
        """Maximum depth of `Outcome.deep` that the parts read; 0 if no part reads it."""
        return max(part.depth for part in self.parts.values())

    @property
    def reads_texts(self) -> bool:
        """True if a part may read the texts of the passages."""
        return self.calls_users or any(
            part.function == likelihood.NAME for part in self.parts.values()
        )

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

    def mix(self, group: Sequence[Mapping[str, float]]) -> list[float | None]:
        """Return one reward per sample of a group, from the parts' values; None if no part applies to it."""
        if factors := [part.name for part in self.parts.values() if part.factor]:
            others = Scoring(
                {name: part for name, part in self.parts.items() if not part.factor}, self.mixer
            )
            scales = [math.prod(values.get(name, 1.0) for name in factors) for values in group]
            mixed_others = zip(others.mix(group), scales, strict=True)
            return [None if reward is None else reward * scale for reward, scale in mixed_others]
        if (
            len(self.parts) == 1 and self.mixer == "weights"
        ):  # 20 times as fast as a matrix of one column
            [part] = self.parts.values()
            return [
                part.weight * values[part.name] if part.name in values else None for values in group
            ]
        rows = [[values.get(name, np.nan) for name in self.parts] for values in group]
        weights = np.array([part.weight for part in self.parts.values()])
        mixed = mix(self.mixer, np.array(rows, dtype=float), weights)
        return [None if np.isnan(value) else float(value) for value in mixed]

    def alone(self, values: Mapping[str, float]) -> float | None:
        """Return the reward of a single outcome from its parts' values. The weighted sum replaces a group mixer."""
        single = Scoring(self.parts) if self.needs_group else self
        return single.mix([values])[0]


def values_of(parts: Mapping[str, Reward], outcome: Outcome) -> dict[str, float]:
    """Return an outcome's rewards by name, without those that do not apply."""
    return {name: value for name, part in parts.items() if (value := part(outcome)) is not None}


def scoring(spec: str | RewardSettings | Reward, key: str = "reward") -> Scoring:
    """Parse a reward from a name, a recipe's section, or a function (which becomes a part named ``key``).

    ConfigError lists all unknown names and settings, each with its key in the recipe.
    """
    parts = _parts(spec, key)
    if problems := _faults(spec, key, parts):
        raise ConfigError(problems)
    combination = (spec.mixer, spec.unparsed_reward) if isinstance(spec, RewardSettings) else ()
    return Scoring({part.name: part for part in parts}, *combination)


def faults(spec: str | RewardSettings, key: str = "") -> list[str]:
    """List the faults in a recipe's reward. Users' functions are not loaded, so not checked."""
    return _faults(spec, key, [part for part in _parts(spec, key) if part.source is None])


def function_names(spec: str | RewardSettings) -> list[str]:
    """Return the names of the users' functions in a reward."""
    return [part.source for part in _parts(spec, "") if part.source is not None]


def _parts(spec: str | RewardSettings | Reward, key: str) -> list[Part]:
    if isinstance(spec, RewardSettings):
        place = f"{key}.parts" if key else "parts"
        parts = spec.parts.items()
        return [
            Part(name, p.function or name, p.arguments, p.weight, f"{place}.{name}", p.factor)
            for name, p in parts
        ]
    if isinstance(spec, str):
        return [Part(Path(spec).name if is_function(spec) else spec, spec, place=key)]
    return [Part(key, spec)]


def _faults(spec: str | RewardSettings | Reward, key: str, parts: Iterable[Part]) -> list[str]:
    problems: list[str] = []
    for part in parts:
        try:
            part.bound  # noqa: B018  loads and binds the function
        except ConfigError as error:
            problems += error.problems
    if not isinstance(spec, RewardSettings):
        return problems
    place = f"{key}." if key else ""
    for name in spec.parts:
        if name in _RESERVED or name.startswith("final."):
            problems.append(f"{place}parts.{name}: this name is reserved; choose another name")
    for part in parts:
        if part.factor and part.weight != 1:
            problems.append(f"{part.place}: a factor has no weight; remove the weight")
    if all(part.factor for part in spec.parts.values()):
        problems.append(f"{place}parts: all parts are factors; add a part to multiply")
    if spec.mixer not in MIXERS:
        problems.append(
            f"{place}mixer: unknown mixer {spec.mixer!r}; available: {', '.join(MIXERS)}"
        )
    if spec.mixer == "uniform" and any(part.weight != 1 for part in spec.parts.values()):
        problems.append(
            f"{place}mixer: uniform ignores weights; remove the weights, or use mixer weights"
        )
    return problems


def settings_of(function: Reward) -> list[str]:
    """Return the names of a reward's parameters after the first (the outcome)."""
    return list(inspect.signature(function).parameters)[1:]
