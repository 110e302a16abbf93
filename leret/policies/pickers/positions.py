"""Where candidates stand: rotary positions, as they are or relative to what was picked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leret.core.types import Choice

_INTERVAL, _INSIDE = 10.0, 9.0
"""Between the positions of two picked chunks, and what the candidates between them share of it."""

_BASE = 1000.0
"""The slowest of the rotations turns once in about 6,000 positions."""


def absolute_positions(choices: Sequence[Choice]) -> NDArray[np.float32]:
    """(n,) places in the document of the candidates of all choices; those without one stand at 0."""
    return _finite(_places(choices))


def relative_positions(choices: Sequence[Choice]) -> NDArray[np.float32]:
    """(n,): which of the intervals between picked chunks each candidate stands in, and how far into it.

    Of a candidate at place i, between the picked chunks at b_j and b_{j+1}, it is 10 j + 9 (i - b_j) / (b_{j+1} - b_j),
    a float; b_0 is before the first place and the last b is after the last one. Candidates without a place stand at 0.

    Source: relative positional encoding of Q-RAG, arXiv 2511.07328, section 3.
    """
    places = _places(choices)
    whose = np.repeat(np.arange(len(choices)), [len(choice.candidates) for choice in choices])
    picked = [sorted(one.position for one in choice.picked if one.position is not None) for choice in choices]
    last = np.array([own[-1] if own else -1.0 for own in picked])
    known = ~np.isnan(places)
    np.maximum.at(last, whose[known], places[known])
    # All choices on one line, each behind the one before.
    offsets = np.cumsum([0.0, *(last[:-1] + 3)])
    bounds = [[-1.0, *own, end + 1] for own, end in zip(picked, last.tolist(), strict=True)]
    ends = np.concatenate([np.array(own) + offset for own, offset in zip(bounds, offsets, strict=True)])
    first = np.cumsum([0, *map(len, bounds)])[:-1]
    at = places + offsets[whose]
    found = np.minimum(np.searchsorted(ends, at, side="right") - 1, len(ends) - 2)  # NaN is sorted last
    inside = _INSIDE * (at - ends[found]) / np.maximum(ends[found + 1] - ends[found], 1.0)
    return _finite(_INTERVAL * (found - first[whose]) + inside)


def _finite(positions: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.where(np.isnan(positions), 0.0, positions).astype(np.float32)


def _places(choices: Sequence[Choice]) -> NDArray[np.float64]:
    return np.array([one.position for choice in choices for one in choice.candidates], np.float64)


def rotated_products(states: Tensor, actions: Tensor, positions: Tensor | None) -> Tensor:
    """Inner products over sqrt(d) of states and actions, these turned by their positions; in two halves.

    Two dimensions side by side are a vector of the plane, which is turned. These pairs belong to the two halves by
    turns, so that both have all frequencies. Each half counts twice: their mean is the whole product.

    Args:
        states: (n, d), d a multiple of 4.
        actions: (n, d).
        positions: (n,) float32; None turns nothing.

    Returns:
        (2, n).

    Source: rotary position embedding, arXiv 2104.09864, equation 34.
    """
    n, d = actions.shape
    s, a = states.reshape(n, d // 2, 2), actions.reshape(n, d // 2, 2)
    products = (s * a).sum(-1)
    if positions is not None:
        rates = torch.exp(torch.arange(d // 2, device=a.device) * (-math.log(_BASE) / (d // 2)))
        angles = positions[:, None] * rates
        crossed = s[..., 1] * a[..., 0] - s[..., 0] * a[..., 1]
        products = products * angles.cos() + crossed * angles.sin()
    return products.reshape(n, d // 4, 2).sum(1).T * (2 / math.sqrt(d))
