"""Mixers of rewards besides the weighted sum: ``mixer: std`` in a recipe.

A mixer maps the parts of one state's samples, (n_samples, n_parts), to rewards, (n_samples,). NaN
means: does not apply.

- A sample to which no part applies gets None, and does not affect other samples.
- `uniform` and `l2` skip NaN. The group mixers replace NaN by the part's mean over the group (which
  is neutral), and leave out a part that is NaN for the whole group.
- If all samples are equal, `std` and `pca` weight all parts equally, and `normalize_then_sum` is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from leret.rewards.combine import GroupMixer, Mixer, weighted_sum

Array = NDArray[np.float64]
ArrayMixer = Callable[[Array, Array], Array]

_EPS = 1e-12  # a smaller spread is a rounding error


def over_arrays(mix: ArrayMixer) -> Mixer:
    """Return the mixer of a function of arrays: parts (n_samples, n_parts), weights (n_parts,)."""

    def mixer(
        group: Sequence[Mapping[str, float]], weights: Mapping[str, float]
    ) -> list[float | None]:
        rows = []
        for values in group:
            rows.append([values.get(name, np.nan) for name in weights])
        parts = np.array(rows, dtype=float).reshape(len(group), len(weights))
        applies = ~np.isnan(parts).all(axis=1)
        rewards: list[float | None] = [None] * len(group)
        if applies.any():
            mixed = mix(parts[applies], np.array(list(weights.values())))
            for i, reward in zip(np.flatnonzero(applies), mixed.tolist(), strict=True):
                rewards[i] = reward
        return rewards

    return mixer


def over_groups(mix: ArrayMixer) -> GroupMixer:
    """Return the group mixer of a function of arrays without NaN."""

    def without_nan(parts: Array, weights: Array) -> Array:
        columns = ~np.isnan(parts).all(axis=0)
        parts = parts[:, columns]
        parts = np.where(np.isnan(parts), np.nanmean(parts, axis=0), parts)
        return mix(parts, weights[columns])

    return GroupMixer(over_arrays(without_nan))


@over_arrays
def uniform(parts: Array, weights: Array) -> Array:
    """Return the mean of the weighted parts that apply."""
    mean: Array = np.nanmean(parts * weights, axis=1)
    return mean


@over_groups
def std(parts: Array, weights: Array) -> Array:
    """Return the mean of the parts, each weighted by its standard deviation in the group."""
    weighted = parts * weights
    deviations = weighted.std(axis=0)
    shares = deviations if deviations.sum() > _EPS else None
    mean: Array = np.average(weighted, axis=1, weights=shares)
    return mean


@over_groups
def pca(parts: Array, weights: Array) -> Array:
    """Return the projection on the first principal component (of length 1) of the group's parts.

    The component's sign is chosen so that the reward grows with the mean of the parts. If their
    covariance is 0, the component's coordinates have a positive sum. If that sum is 0 too, the
    first nonzero coordinate is positive.
    """
    weighted = parts * weights
    centred = weighted - weighted.mean(axis=0)
    axis: Array = np.full(len(weights), 1 / np.sqrt(len(weights)))
    if np.any(np.abs(centred) > _EPS):
        _, vectors = np.linalg.eigh(centred.T @ centred)
        axis = vectors[:, -1]
        covariance = (centred @ axis) @ centred.mean(axis=1)
        signs = (covariance, axis.sum(), *axis)
        if next(sign for sign in signs if abs(sign) > _EPS) < 0:
            axis = -axis
    return weighted @ axis


@over_arrays
def l2(parts: Array, weights: Array) -> Array:
    """Return the L2 norm of a sample's positive parts minus the L2 norm of its negative parts."""
    weighted = np.nan_to_num(parts * weights, nan=0.0)
    positive = np.linalg.norm(np.maximum(weighted, 0), axis=1)
    negative = np.linalg.norm(np.minimum(weighted, 0), axis=1)
    norm: Array = positive - negative
    return norm


@over_groups
def normalize_then_sum(parts: Array, weights: Array) -> Array:
    """Return the weighted sum of the parts, each standardised in the group.

    Source: GDPO (arXiv 2601.05242).
    """
    centred = parts - parts.mean(axis=0)
    deviations = parts.std(axis=0)
    divisors = np.where(deviations > _EPS, deviations, np.inf)
    total: Array = centred / divisors @ weights
    return total


def factors(
    group: Sequence[Mapping[str, float]], weights: Mapping[str, float]
) -> list[float | None]:
    """Return the weighted sum of the parts, times the parts with weight 0.

    A factor that does not apply is 1. LAPDOG multiplies by ``length`` in this way.
    """
    terms = {name: weight for name, weight in weights.items() if weight}
    rewards = weighted_sum(group, terms)
    for i, values in enumerate(group):
        reward = rewards[i]
        if reward is not None:
            product = math.prod(values.get(name, 1.0) for name in weights if name not in terms)
            rewards[i] = reward * product
    return rewards
