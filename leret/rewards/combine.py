"""Mixers: from the parts of a group's rewards to one reward a sample.

Each takes a float matrix of (n_samples, n_parts), the samples of one state by the parts of the recipe's reward, and
gives (n_samples,). The parts come multiplied by their weights. NaN stands for a part that does not apply; a sample
to which no part applies gets NaN. What is undefined otherwise is defined here:

- `weights` and `uniform` pass over parts that are NaN.
- The others put the part's mean over the group where it is NaN, which tells the sample from none; a part that is NaN
  for the whole group is left out.
- Zero spread (one sample, or equal ones): `std` and `pca` take all parts alike, `normalize_then_sum` gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mixer = Callable[[Array], Array]

_EPS = 1e-12
"""A spread below it is a rounding error."""


def weights(parts: Array) -> Array:
    """The sum of the parts that apply."""
    return np.where(_applies(parts), np.nansum(parts, axis=1), np.nan)


def uniform(parts: Array) -> Array:
    """The mean of the parts that apply."""
    mean: Array = weights(parts) / np.maximum((~np.isnan(parts)).sum(axis=1), 1)
    return mean


def std(parts: Array) -> Array:
    """The mean of the parts, each weighted by its standard deviation in the group: by how well it tells samples apart.

    Deviations are of the population (divided by n).
    """
    filled = _filled(parts)
    deviations = filled.std(axis=0)
    total = deviations.sum()
    shares = deviations / total if total > _EPS else np.full(deviations.shape, 1 / max(1, len(deviations)))
    return np.where(_applies(parts), filled @ shares, np.nan)


def pca(parts: Array) -> Array:
    """The projection on the first principal component of the group's parts, which is of length 1.

    Its sign is such that the reward grows with the mean of the parts over the group; where the two have no
    covariance, such that the component's coordinates have a positive sum.
    """
    filled = _filled(parts)
    n_parts = filled.shape[1]
    centred = filled - filled.mean(axis=0)
    if n_parts == 0 or not np.any(np.abs(centred) > _EPS):
        axis = np.full(n_parts, 1 / np.sqrt(max(1, n_parts)))
    else:
        axis = np.linalg.eigh(centred.T @ centred)[1][:, -1]
        growth = float((centred @ axis) @ centred.mean(axis=1))
        axis = -axis if (growth if abs(growth) > _EPS else axis.sum()) < 0 else axis
    return np.where(_applies(parts), filled @ axis, np.nan)


def l2(parts: Array) -> Array:
    """The L2 norm of a sample's parts; of negative ones it is taken apart and subtracted, so that worse is less."""
    known = np.nan_to_num(parts, nan=0.0)
    norm = np.linalg.norm(np.maximum(known, 0), axis=1) - np.linalg.norm(np.minimum(known, 0), axis=1)
    return np.where(_applies(parts), norm, np.nan)


def normalize_then_sum(parts: Array) -> Array:
    """The sum of the parts after each has been brought to mean 0 and deviation 1 in the group.

    So no part outweighs another by its scale alone; `mix` multiplies by the weights after it. Deviations are of the
    population. Source: GDPO (arXiv 2601.05242).
    """
    filled = _filled(parts)
    deviations = filled.std(axis=0)
    scaled = (filled - filled.mean(axis=0)) / np.where(deviations > _EPS, deviations, np.inf)
    return np.where(_applies(parts), scaled.sum(axis=1), np.nan)


MIXERS: Mapping[str, Mixer] = {
    "weights": weights,
    "uniform": uniform,
    "std": std,
    "pca": pca,
    "l2": l2,
    "normalize_then_sum": normalize_then_sum,
}
"""By their names in recipes."""

OF_GROUP = frozenset({"std", "pca", "normalize_then_sum"})
"""Mixers in which a sample's reward depends on the others of its state."""


def mix(mixer: str, parts: Array, scale: Array) -> Array:
    """One reward a sample of a group.

    Args:
        mixer: a name of `MIXERS`.
        parts: (n_samples, n_parts), NaN where a part does not apply.
        scale: (n_parts,), the weights.
    """
    if mixer == "normalize_then_sum":  # a factor before the normalisation would be taken out by it
        columns = [normalize_then_sum(parts[:, [i]]) for i in range(parts.shape[1])]
        return weights(np.stack(columns, axis=1) * scale)
    return MIXERS[mixer](parts * scale)


def _applies(parts: Array) -> NDArray[np.bool_]:
    return np.array((~np.isnan(parts)).any(axis=1))


def _filled(parts: Array) -> Array:
    """Without the parts that are NaN for all; elsewhere NaN becomes the part's mean over the group."""
    known = parts[:, ~np.isnan(parts).all(axis=0)]
    return np.where(np.isnan(known), np.nanmean(known, axis=0), known)
