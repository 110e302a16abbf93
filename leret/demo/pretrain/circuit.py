"""Weights that copy from the start.

To write an unseen name a model must look up what followed its first word in the prompt. Two heads do that together: one
carries each word on to its successor, another one looks for the place whose predecessor is the present word and copies
what stands there (https://arxiv.org/abs/2209.11895 calls it an induction head). A model of a million parameters finds
the pair only after many millions of tokens, and whether it does so depends on luck; so it is given one, which training
then keeps, sharpens or drops. Two more heads of the last layer start as faint copiers of whatever they attend to, so
that they have only to learn where to look. All else starts by adding nothing.

The residual stream is laid out for it: dimension 0 is the same for every word, the last ones are empty but for what the
carrying head writes, and those in between hold the word.
"""

from __future__ import annotations

import torch
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

_CARRIED = 32
"""Dimensions for the word before."""
_FAST = (0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.2, 0.2)
"""Weights of the fastest rotations in the carrying head: their sum peaks at a distance of one word."""
_SHARPNESS = 2.0
_COPY, _FAINT = 3.0, 2.0


@torch.no_grad()
def give_copying(model: Qwen3ForCausalLM, seed: int) -> None:
    """Write a copying pair of heads into the first and the last layer of a fresh model.

    Args:
        model: with at least two layers, three heads of 64 dimensions and a large rotary base (1e6).
        seed: of the random projections.
    """
    generator = torch.Generator().manual_seed(seed)
    width = model.config.hidden_size
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    words, scale = model.model.embed_tokens.weight, width**-0.5
    words[:, 0] = 3 * scale
    words[:, width - _CARRIED :] = 0
    model.lm_head.weight.copy_(words)
    basis = _basis(width, generator)
    _carry(model.model.layers[0].self_attn, basis, model.config.head_dim, scale, _rotations(model))
    _copy(model.model.layers[-1].self_attn, basis, _basis(width, generator), model.config.head_dim, scale)


def _rotations(model: Qwen3ForCausalLM) -> torch.Tensor:
    size = model.config.head_dim
    base = float(dict(model.config.rope_parameters or {})["rope_theta"])
    return torch.pow(base, -torch.arange(size // 2) / (size / 2))


def _basis(width: int, generator: torch.Generator) -> torch.Tensor:
    """(n, width) orthonormal rows that span the dimensions of the word."""
    span = width - _CARRIED - 1
    made = torch.zeros(span, width)
    made[:, 1 : 1 + span], _ = torch.linalg.qr(torch.randn(span, span, generator=generator))
    return made


def _carry(attention: Qwen3Attention, basis: torch.Tensor, size: int, scale: float, rotations: torch.Tensor) -> None:
    """Head 0 attends one word back and writes what it finds there to the empty dimensions."""
    n, half = len(_FAST), size // 2
    strength = torch.zeros(half)
    strength[:n] = torch.tensor(_FAST)
    attention.q_proj.weight[:size] *= 0.1
    attention.k_proj.weight[:size] *= 0.1
    attention.k_proj.weight[:size, 0] = torch.cat([strength, torch.zeros(half)])
    attention.q_proj.weight[:size, 0] = torch.cat([strength * rotations.cos(), -strength * rotations.sin()])
    fast = [*range(n), *range(half, half + n)]
    attention.q_norm.weight[fast] = _SHARPNESS
    attention.k_norm.weight[fast] = _SHARPNESS
    attention.v_proj.weight[:_CARRIED] = basis[:_CARRIED]
    attention.o_proj.weight[-_CARRIED:, :_CARRIED] = scale * torch.eye(_CARRIED)


def _copy(attention: Qwen3Attention, basis: torch.Tensor, copied: torch.Tensor, size: int, scale: float) -> None:
    """Head 0 looks for the place whose predecessor is the present word; heads 0, 1 and 2 copy what they attend to.

    The comparison stands in the slowest rotations, which turn little over a prompt and so compare words, not places.
    """
    half, quarter = size // 2, _CARRIED // 2
    slow = [*range(half - quarter, half), *range(size - quarter, size)]
    attention.q_proj.weight[:size] *= 0.1
    attention.k_proj.weight[:size] = 0
    attention.q_proj.weight[slow] = basis[:_CARRIED]
    attention.k_proj.weight[slow, -_CARRIED:] = torch.eye(_CARRIED)
    attention.q_norm.weight[slow] = _SHARPNESS
    attention.k_norm.weight[slow] = _SHARPNESS
    for head, rows in enumerate((copied[:size], copied[:size], copied[-size:])):
        here = slice(head * size, (head + 1) * size)
        attention.v_proj.weight[here] = rows
        attention.o_proj.weight[:, here] = (_FAINT if head else _COPY) * scale * rows.T
