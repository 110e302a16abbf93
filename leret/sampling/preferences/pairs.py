"""Which completions of a state are preferred to which others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise, product
from typing import Literal

from leret.core.types import Sample
from leret.sampling.rollouts.selection import reward_levels

Strategy = Literal["adjacent", "best-worst", "all", "margin"]
Pair = tuple[Sample, Sample]
"""Chosen, rejected."""


def distinct(samples: Sequence[Sample]) -> list[Sample]:
    """Samples with a reward, the first of those with the same completion."""
    by_text: dict[str, Sample] = {}
    for sample in samples:
        if sample.reward is not None and sample.completion is not None:
            by_text.setdefault(sample.completion, sample)
    return list(by_text.values())


def make_pairs(
    samples: Sequence[Sample], strategy: Strategy, margin: float = 0.0, max_pairs: int | None = None
) -> list[Pair]:
    """Pairs of one state, by level, then in the order of the samples.

    Args:
        samples: of the state, distinct.
        strategy: ``adjacent``: each completion of a reward level over each of the level just below (LeReT);
            ``best-worst``: of the highest over the lowest; ``all``: over every lower level; ``margin``: every pair
            whose rewards differ by ``margin`` or more.
        margin: of strategy ``margin``.
        max_pairs: the widest margins are kept; ties in the order of the samples.
    """
    levels = [members for _, members in reward_levels(samples)]
    pairs = [pair for upper, lower in _LEVELS[strategy](levels) for pair in product(upper, lower)]
    if strategy == "margin":
        pairs = [pair for pair in pairs if _margin(pair) >= margin]
    if max_pairs is not None:
        widest = sorted(range(len(pairs)), key=lambda i: -_margin(pairs[i]))[:max_pairs]
        pairs = [pairs[i] for i in sorted(widest)]
    return pairs


_LEVELS: dict[Strategy, Callable[[list[list[Sample]]], Iterable[tuple[list[Sample], list[Sample]]]]] = {
    "adjacent": pairwise,
    "best-worst": lambda levels: [(levels[0], levels[-1])] if len(levels) > 1 else [],
    "all": lambda levels: combinations(levels, 2),
    "margin": lambda levels: combinations(levels, 2),
}
"""Which reward levels, highest first, are compared."""


def _margin(pair: Pair) -> float:
    return (pair[0].reward or 0.0) - (pair[1].reward or 0.0)
