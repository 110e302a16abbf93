"""Random choice of the next token. A choice depends only on its seed and step, not on the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


_BLOCK = 1024
"""Tokens per block.

In a larger vocabulary, first a block is drawn, then a token in it, which needs less noise.
"""


def step_keys(seeds: Sequence[int], n_steps: int) -> np.ndarray:
    """Return one noise key per seed and step: (n_seeds, n_steps) uint64."""
    seed_keys = _mix(np.array(seeds, dtype=np.uint64))
    steps = np.arange(n_steps, dtype=np.uint64)
    return _mix(seed_keys[:, None] + steps)


def exponentials(keys: np.ndarray, n: int) -> Tensor:
    """Return exponential noise with mean 1, (n_keys, n) float64.

    Each number depends only on its key and column.
    """
    columns = np.arange(n, dtype=np.uint64)
    bits = _mix(keys[:, None] + columns)
    # 52 bits plus one half: exact in float64, and never 0 or 1.
    uniform = ((bits >> 12) + 0.5) * 2.0**-52
    return -torch.log(torch.from_numpy(uniform))


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Apply a bijective hash to 64-bit numbers; products wrap around.

    Source: the output function of SplitMix64 (Steele, Lea and Flood, doi 10.1145/2660193.2660195).
    """
    mixed: np.ndarray = (numbers + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed ^= mixed >> 31
    return mixed


def choose(
    logits: Tensor,
    keys: np.ndarray,
    temperature: Tensor,
    top_p: Tensor,
    suppressed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: the token with the maximum of probability / exponential noise.

    This is the Gumbel-max trick without its logarithm. The other rows of a batch may change the
    last digits of float32 logits. This changes a draw only if the two largest quotients are equal
    in all other digits.

    Args:
        logits: (n_rows, n_vocabulary) float32; overwritten at the suppressed tokens.
        keys: (n_rows,) uint64, the noise keys of this step.
        temperature: (n_rows,) float32; 0 selects the most likely token.
        top_p: (n_rows,) float32 in (0, 1]; draws from the smallest set of top tokens with this
            total probability.
        suppressed: (n,) int64, tokens that are never chosen.

    Returns:
        Token ids (n_rows,) int64 and their natural log-probabilities (n_rows,) float32 under the
        model's distribution at temperature 1 without suppression.

    Source: top-p after Holtzman et al., arXiv 1904.09751.
    """
    normaliser = torch.logsumexp(logits, dim=-1)
    if suppressed is not None:
        logits.index_fill_(1, suppressed, -torch.inf)
    sampled = temperature > 0
    ids = logits.argmax(dim=-1)
    if bool(sampled.any()):
        weights = torch.softmax(logits / torch.where(sampled, temperature, 1.0)[:, None], dim=-1)
        if bool((top_p < 1).any()):
            weights = _nucleus(weights, top_p)
        ids = torch.where(sampled, _draw(weights, keys), ids)
    return ids, logits.gather(1, ids[:, None])[:, 0] - normaliser


def _draw(weights: Tensor, keys: np.ndarray) -> Tensor:
    n = weights.shape[1]
    if n <= _BLOCK:
        return _race(weights, exponentials(keys, n))
    n_blocks = -(-n // _BLOCK)
    noise = exponentials(keys, _BLOCK + n_blocks)
    blocks = pad(weights, (0, -n % _BLOCK)).unflatten(1, (-1, _BLOCK))
    block = _race(blocks.sum(dim=-1), noise[:, _BLOCK:])
    rows = torch.arange(len(blocks), device=blocks.device)
    within = _race(blocks[rows, block], noise[:, :_BLOCK])
    return block * _BLOCK + within


def _race(weights: Tensor, noise: Tensor) -> Tensor:
    quotients = weights / noise.to(weights.device)
    return quotients.argmax(dim=-1)


def _nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    outside = before >= top_p[:, None]
    outside &= (top_p < 1)[:, None]
    mask = torch.zeros_like(outside).scatter(1, order, outside)
    return weights.masked_fill(mask, 0.0)
