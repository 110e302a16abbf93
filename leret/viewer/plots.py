"""Axes and curves of the pages' plots, which templates draw as SVG (assets/plots.html.j2).

A plot is an SVG that is stretched to its place, with labels as text beside it, so labels keep their
size on every screen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TICKS = 4

_DIFFERENCE = "sampling/sampling_logp_difference"
_RATIO = "sampling/importance_sampling_ratio"

_TOKENS = "|log p sampler - log p trainer|, nats per token"
_COMPLETIONS = "p trainer / p sampler, of whole completions"
MISMATCH = (_TOKENS, _COMPLETIONS)
"""Titles of the panels on sampler and trainer."""

_PANELS = (
    ("validation recall", {"eval_recall": "recall"}),
    ("mean reward", {"reward": "reward"}),
    (
        "rewards of the samples",
        {
            "reward_percentiles/0": "smallest",
            "reward_percentiles/20": "20th percentile",
            "reward_percentiles/50": "median",
            "reward_percentiles/80": "80th percentile",
            "reward_percentiles/100": "largest",
        },
    ),
    ("KL to the initial policy, nats", {"kl": "KL"}),
    ("entropy, nats per token", {"entropy": "entropy"}),
    ("share of groups without spread", {"frac_reward_zero_std": "share"}),
    ("share of unparsed completions", {"completions/unparsed": "share"}),
    ("mean length of a completion, tokens", {"completions/mean_length": "tokens"}),
    ("loss", {"loss": "loss"}),
    ("share of pairs with chosen preferred", {"rewards/accuracies": "share"}),
    ("implicit rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}),
    ("gradient norm", {"grad_norm": "norm"}),
    (
        _TOKENS,
        {f"{_DIFFERENCE}/mean": "mean", f"{_DIFFERENCE}/max": "largest"},
    ),
    (
        _COMPLETIONS,
        {f"{_RATIO}/mean": "mean", f"{_RATIO}/max": "largest", f"{_RATIO}/min": "smallest"},
    ),
)

_PART = re.compile(r"rewards/((?!reward/).+)/mean")
"""Logged mean of a part of the reward; TRL logs the whole reward as the part ``reward``."""

Panel = tuple[str, Mapping[str, Sequence[tuple[float, float]]]]
"""(title, lines), where each line's name maps to its (x, y) points."""


@dataclass(frozen=True)
class Axis:
    """A range of values with round numbers in it."""

    low: float
    high: float
    ticks: Sequence[float]

    def at(self, value: float) -> float:
        """Return the place of a value on the axis, in percent of its length."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)


def axis(values: Iterable[float | None], *, tight: bool = False) -> Axis:
    """Return the axis from a round number below the values to one above them.

    ``tight``: from the smallest to the largest value, with whole numbers as ticks.

    >>> axis([0.52, 0.97]).ticks
    [0.4, 0.6, 0.8, 1.0]
    """
    present = [value for value in values if value is not None] or [0.0, 1.0]
    low, high = min(present), max(present)
    if high - low <= 1e-9 * abs(high):
        high = low + (abs(low) or 1.0)
    step = _round_up((high - low) / _TICKS)
    if tight:
        step = max(1.0, step)
        first, last = math.ceil(low / step), math.floor(high / step)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [float(f"{i * step:.9g}") for i in range(first, last + 1)]
    if tight:
        return Axis(low, high, ticks)
    return Axis(ticks[0], ticks[-1], ticks)


def _round_up(value: float) -> float:
    """Return the smallest of 1, 2, 5 and 10 times a power of ten that is at least the value."""
    power: float = 10.0 ** math.floor(math.log10(value))
    return min(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * (1 - 1e-9))


def curves_of(training: Mapping[str, Any]) -> list[Panel]:
    """Return the panels of a training.json with at least two logged points."""
    log = [values for values in training.get("log_history") or () if "step" in values]
    panels: list[Panel] = []
    for title, keys in (*_PANELS[:2], ("mean of each reward part", _parts(log)), *_PANELS[2:]):
        lines = {}
        for key, label in keys.items():
            points = [(row["step"], row[key]) for row in log if row.get(key) is not None]
            if len(points) > 1:
                lines[label] = points
        if lines:
            panels.append((title, lines))
    return panels


def _parts(log: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Map the logged keys of reward parts to the names of the parts."""
    parts = {}
    for values in log:
        for key in values:
            match = _PART.fullmatch(key)
            if match:
                parts[key] = match[1]
    return parts
