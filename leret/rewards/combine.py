"""Mixers: combine the parts of a group's rewards into one reward per sample.

`mix` maps the parts of one state's samples, (n_samples, n_parts), to rewards, (n_samples,). NaN
means: does not apply.

- A sample to which no part applies gets NaN, and does not affect other samples.
- `weights`, `uniform` and `l2` skip NaN. The other mixers replace NaN by the part's mean over the
  group (which is neutral), and leave out a part that is NaN for the whole group.
- If all samples are equal, `std` and `pca` weight all parts equally, and `normalize_then_sum` is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_EPS = 1e-12  # a smaller spread is a rounding error


def weights(parts: Array, scale: Array) -> Array:
    """Return the weighted sum of the parts that apply."""
    total: Array = np.nansum(parts * scale, axis=1)
    return total


def uniform(parts: Array, scale: Array) -> Array:
    """Return the mean of the parts that apply."""
    mean: Array = np.nanmean(parts * scale, axis=1)
    return mean


def std(parts: Array, scale: Array) -> Array:
    """Return the mean of the parts, each weighted by its standard deviation in the group."""
    weighted = parts * scale
    deviations = weighted.std(axis=0)
    weights = deviations if deviations.sum() > _EPS else None
    mean: Array = np.average(weighted, axis=1, weights=weights)
    return mean


def pca(parts: Array, scale: Array) -> Array:
    """Return the projection on the first principal component (of length 1) of the group's parts.

    The component's sign is chosen so that the reward grows with the mean of the parts. If their
    covariance is 0, the component's coordinates have a positive sum. If that sum is 0 too, the
    first nonzero coordinate is positive.
    """
    weighted = parts * scale
    centred = weighted - weighted.mean(axis=0)
    axis: Array = np.full(len(scale), 1 / np.sqrt(len(scale)))
    if np.any(np.abs(centred) > _EPS):
        _, vectors = np.linalg.eigh(centred.T @ centred)
        axis = vectors[:, -1]
        covariance = (centred @ axis) @ centred.mean(axis=1)
        signs = (covariance, axis.sum(), *axis)
        if next(sign for sign in signs if abs(sign) > _EPS) < 0:
            axis = -axis
    return weighted @ axis


def l2(parts: Array, scale: Array) -> Array:
    """Return the L2 norm of a sample's positive parts minus the L2 norm of its negative parts."""
    weighted = np.nan_to_num(parts * scale, nan=0.0)
    positive = np.linalg.norm(np.maximum(weighted, 0), axis=1)
    negative = np.linalg.norm(np.minimum(weighted, 0), axis=1)
    norm: Array = positive - negative
    return norm


def normalize_then_sum(parts: Array, scale: Array) -> Array:
    """Return the weighted sum of the parts, each standardised in the group.

    Source: GDPO (arXiv 2601.05242).
    """
    centred = parts - parts.mean(axis=0)
    deviations = parts.std(axis=0)
    divisors = np.where(deviations > _EPS, deviations, np.inf)
    total: Array = centred / divisors @ scale
    return total


MIXERS: Mapping[str, Callable[[Array, Array], Array]] = {
    "weights": weights,
    "uniform": uniform,
    "std": std,
    "pca": pca,
    "l2": l2,
    "normalize_then_sum": normalize_then_sum,
}
"""Mixers by name in recipes.

They take the parts of the samples to which any part applies, and the weights.
"""

GROUP_MIXERS = frozenset({"std", "pca", "normalize_then_sum"})
"""Mixers for which a sample's reward depends on the other samples of its state."""


def mix(mixer: str, parts: Array, scale: Array) -> Array:
    """Return one reward per sample. ``parts`` is (n_samples, n_parts).

    ``scale``, the weights, is (n_parts,).
    """
    applies = ~np.isnan(parts).all(axis=1)
    rewards = np.full(len(parts), np.nan)
    if not applies.any():
        return rewards
    rows = parts[applies]
    if mixer in GROUP_MIXERS:
        columns = ~np.isnan(rows).all(axis=0)
        rows = rows[:, columns]
        scale = scale[columns]
        rows = np.where(np.isnan(rows), np.nanmean(rows, axis=0), rows)
    rewards[applies] = MIXERS[mixer](rows, scale)
    return rewards
