"""Where candidates stand: rotary positions, as they are or relative to what was picked."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_INTERVAL, _INSIDE = 10.0, 9.0
"""Between the positions of two picked chunks, and what the candidates between them share of it."""

_BASE = 1000.0
"""The slowest of the rotations turns once in about 6,000 positions."""


def absolute_positions(places: NDArray[np.float64]) -> NDArray[np.float32]:
    """Places in the document; candidates without one stand at 0."""
    return np.nan_to_num(places).astype(np.float32)


def relative_positions(places: NDArray[np.float64], picked: NDArray[np.float64]) -> NDArray[np.float32]:
    """Which of the intervals between picked chunks a candidate stands in, and how far into it.

    Of a candidate at place i, between the picked chunks at b_j and b_{j+1}, it is 10 j + 9 (i - b_j) / (b_{j+1} - b_j),
    a float; b_0 is before the first place and the last b is after the last one.

    Args:
        places: (n_candidates,) in the document, NaN where there is none; those are at position 0.
        picked: (n_picked,) likewise.

    Source: relative positional encoding of Q-RAG, arXiv 2511.07328, section 3.
    """
    inner = np.sort(picked[~np.isnan(picked)])
    last = np.max(np.concatenate([inner, places[~np.isnan(places)], [-1.0]]))
    ends = np.concatenate([[-1.0], inner, [last + 1]])
    interval = np.searchsorted(inner, places, side="right")  # NaN is sorted last
    before, after = ends[interval], ends[interval + 1]
    inside = _INSIDE * (places - before) / np.maximum(after - before, 1.0)
    return absolute_positions(_INTERVAL * interval + inside)


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
