"""Mixers: from the parts of a group's rewards to one reward a sample.

`mix` takes a float matrix of (n_samples, n_parts), the samples of one state by the parts of the recipe's reward, and
gives (n_samples,). NaN stands for a part that does not apply. What is undefined otherwise is defined here:

- A sample to which no part applies gets NaN, and counts for no other one.
- `weights`, `uniform` and `l2` pass over parts that are NaN. For the others such a part is its mean over the group,
  which tells the sample from none; a part that is NaN for the whole group is left out.
- Zero spread (one sample, or equal ones): `std` and `pca` take all parts alike, `normalize_then_sum` gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_EPS = 1e-12
"""A spread below it is a rounding error."""


def weights(parts: Array, scale: Array) -> Array:
    """The sum of the parts that apply."""
    total: Array = np.nansum(parts * scale, axis=1)
    return total


def uniform(parts: Array, scale: Array) -> Array:
    """The mean of the parts that apply."""
    mean: Array = np.nanmean(parts * scale, axis=1)
    return mean


def std(parts: Array, scale: Array) -> Array:
    """The mean of the parts, each weighted by its deviation in the group: by how well it tells samples apart."""
    deviations = (parts * scale).std(axis=0)
    mean: Array = np.average(parts * scale, axis=1, weights=deviations if deviations.sum() > _EPS else None)
    return mean


def pca(parts: Array, scale: Array) -> Array:
    """The projection on the first principal component of the group's parts, which is of length 1.

    Its sign makes the reward grow with the mean of the parts over the group. Without covariance between the two, the
    component's coordinates have a positive sum; if that is 0 too, the first coordinate other than 0 is positive.
    """
    weighted = parts * scale
    centred = weighted - weighted.mean(axis=0)
    axis: Array = np.full(len(scale), 1 / np.sqrt(len(scale)))
    if np.any(np.abs(centred) > _EPS):
        axis = np.linalg.eigh(centred.T @ centred)[1][:, -1]
        signs = ((centred @ axis) @ centred.mean(axis=1), axis.sum(), *axis)
        axis = -axis if next(sign for sign in signs if abs(sign) > _EPS) < 0 else axis
    return weighted @ axis


def l2(parts: Array, scale: Array) -> Array:
    """The L2 norm of a sample's parts; of negative ones it is taken apart and subtracted, so that worse is less."""
    known = np.nan_to_num(parts * scale, nan=0.0)
    norm: Array = np.linalg.norm(np.maximum(known, 0), axis=1) - np.linalg.norm(np.minimum(known, 0), axis=1)
    return norm


def normalize_then_sum(parts: Array, scale: Array) -> Array:
    """The weighted sum of the parts, each brought to mean 0 and deviation 1 in the group: no scale counts but weights.

    Source: GDPO (arXiv 2601.05242).
    """
    deviations = parts.std(axis=0)
    total: Array = (parts - parts.mean(axis=0)) / np.where(deviations > _EPS, deviations, np.inf) @ scale
    return total


MIXERS: Mapping[str, Callable[[Array, Array], Array]] = {
    "weights": weights,
    "uniform": uniform,
    "std": std,
    "pca": pca,
    "l2": l2,
    "normalize_then_sum": normalize_then_sum,
}
"""By their names in recipes: of the parts of samples to which any applies, and the weights."""

GROUP_MIXERS = frozenset({"std", "pca", "normalize_then_sum"})
"""Mixers in which a sample's reward depends on the others of its state."""


def mix(mixer: str, parts: Array, scale: Array) -> Array:
    """One reward a sample of a group.

    Args:
        mixer: a name of `MIXERS`.
        parts: (n_samples, n_parts), NaN where a part does not apply.
        scale: (n_parts,), the weights.
    """
    applies = ~np.isnan(parts).all(axis=1)
    mixed = np.full(len(parts), np.nan)
    if applies.any():
        known = parts[applies]
        if mixer in GROUP_MIXERS:
            some = ~np.isnan(known).all(axis=0)
            known, scale = known[:, some], scale[some]
            known = np.where(np.isnan(known), np.nanmean(known, axis=0), known)
        mixed[applies] = MIXERS[mixer](known, scale)
    return mixed
