"""The same loss for less work on a CPU: short rows are not padded to long ones, a pair's prompt runs once.

TRL runs a pair as two sequences, so the prompt, by far the longest part, twice; it pads all of a batch to its longest
row; and outside GPUs it multiplies every position with the output matrix, though only those of completions count. For
a policy of a few million parameters on a CPU these are most of the time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad

SHARED = "shared_prefix"
"""Name of the batch's column that says how many tokens the two sequences of a pair have in common."""

_KNOWN = frozenset({"llama", "opt", "qwen2", "qwen3"})
"""Model types whose backbones take a mask of their own and positions: the tests compare them with the plain forward."""

_OURS = frozenset({"input_ids", "attention_mask", "position_ids"})
_WORTHWHILE = 0.1


def make_thrifty(model: Any) -> bool:
    """Let a model's backbone run batches in groups of like length, and pairs with their prompt once.

    Args:
        model: before a trainer gets it; right-padded batches are expected.

    Returns:
        Whether the model is of a kind that this is tested for; others are left as they are.
    """
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    if inner.config.model_type not in _KNOWN or getattr(inner.config, "use_sliding_window", False):
        return False
    backbone = inner.base_model
    plain = backbone.forward
    eager = inner.config._attn_implementation == "eager"

    @functools.wraps(plain)
    def forward(*args: Any, **keys: Any) -> Any:
        shared = keys.pop(SHARED, None)
        ids, mask = keys.get("input_ids"), keys.get("attention_mask")
        rest = {name: value for name, value in keys.items() if name not in _OURS}
        foreign = args or keys.get("past_key_values") is not None or keys.get("position_ids") is not None
        if foreign or ids is None or mask is None or mask.dim() != 2 or len(ids) < 2:
            return plain(*args, **keys)
        if shared is None:
            return _output(_rows(plain, ids, mask, rest))
        return _output(_pairs(plain, ids, mask, shared, rest, eager=eager))

    backbone.forward = forward
    return True


@contextmanager
def compact_heads() -> Iterator[None]:
    """Let TRL's output head score only the positions that have a label, as it does on GPUs."""
    from trl.trainer import utils

    before = getattr(utils, "_use_triton", None)
    if before is None:
        yield
        return
    # `trl.trainer.utils` asks this only whether to leave out the other positions; the kernels ask their own module.
    utils._use_triton = lambda device: device.type in {"cpu", "cuda", "xpu"}
    try:
        yield
    finally:
        utils._use_triton = before


def row_groups(lengths: list[int]) -> list[list[int]]:
    """Rows in groups that are padded each to its own longest, where that saves at least a tenth.

    >>> row_groups([9, 2, 9, 2])
    [[0, 2], [1, 3]]
    >>> row_groups([9, 9, 8])
    [[0, 1, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    whole = lengths[order[0]] * len(order)
    cuts = [lengths[order[0]] * i + lengths[order[i]] * (len(order) - i) for i in range(1, len(order))]
    if not cuts or min(cuts) > (1 - _WORTHWHILE) * whole:
        return [sorted(order)]
    cut = cuts.index(min(cuts)) + 1
    parts = [order[:cut], order[cut:]]
    return [[part[i] for i in group] for part in parts for group in row_groups([lengths[row] for row in part])]


def _rows(plain: Any, ids: torch.Tensor, mask: torch.Tensor, rest: dict[str, Any]) -> torch.Tensor:
    """(n, length, hidden) of n sequences."""
    lengths = mask.sum(dim=1).tolist()
    groups = row_groups(lengths)
    found = []
    for group in groups:
        width = max(lengths[row] for row in group)
        hidden = plain(input_ids=ids[group, :width], attention_mask=mask[group, :width], **rest).last_hidden_state
        found.append(_widened(hidden, ids.shape[1]))
    return torch.cat(found)[_inverse(groups)]


def _pairs(
    plain: Any, ids: torch.Tensor, mask: torch.Tensor, shared: torch.Tensor, rest: dict[str, Any], *, eager: bool
) -> torch.Tensor:
    """(2n, length, hidden) of n chosen and n rejected sequences, whose first ``shared`` (n,) tokens are the same."""
    n = len(shared)
    chosen, rejected = mask[:n].sum(dim=1), mask[n:].sum(dim=1)
    groups = row_groups((chosen + rejected - shared).tolist())
    found = [
        _joined(plain, ids[:n][group], ids[n:][group], chosen[group], rejected[group], shared[group], rest, eager=eager)
        for group in groups
    ]
    inverse = _inverse(groups)
    return torch.cat([torch.cat([pair[side] for pair in found])[inverse] for side in (0, 1)])


def _joined(
    plain: Any,
    chosen_ids: torch.Tensor,
    rejected_ids: torch.Tensor,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    shared: torch.Tensor,
    rest: dict[str, Any],
    *,
    eager: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row a pair: prompt, chosen completion, rejected completion, of which the last does not see the one before."""
    length = chosen_ids.shape[1]
    chosen, rejected, shared = chosen[:, None], rejected[:, None], shared[:, None]
    place = torch.arange(int((chosen + rejected - shared).max()), device=chosen_ids.device)[None]
    in_rejected = place >= chosen
    source = torch.where(in_rejected, place - chosen + shared, place).clamp(max=length - 1)
    ids = torch.where(in_rejected, rejected_ids.gather(1, source), chosen_ids.gather(1, source.clamp(max=length - 1)))
    valid = place < chosen + rejected - shared
    others = in_rejected[:, :, None] & ((place >= shared) & ~in_rejected)[:, None, :]
    seen = (place[:, None, :] <= place[:, :, None]) & valid[:, None, :] & ~others
    hidden = plain(
        input_ids=ids, attention_mask=_mask(seen, eager=eager), position_ids=source, **rest
    ).last_hidden_state
    back = torch.arange(length, device=ids.device)[None]
    back = torch.where(back < shared, back, back - shared + chosen).clamp(max=hidden.shape[1] - 1)
    return _widened(hidden, length), hidden.gather(1, back[:, :, None].expand(-1, -1, hidden.shape[2]))


def _mask(seen: torch.Tensor, *, eager: bool) -> torch.Tensor:
    seen = seen[:, None]
    if not eager:
        return seen
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, torch.finfo(torch.float32).min)


def _widened(hidden: torch.Tensor, length: int) -> torch.Tensor:
    return pad(hidden, (0, 0, 0, length - hidden.shape[1])) if hidden.shape[1] < length else hidden[:, :length]


def _inverse(groups: list[list[int]]) -> list[int]:
    order = [row for group in groups for row in group]
    return sorted(range(len(order)), key=order.__getitem__)


def _output(hidden: torch.Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return BaseModelOutputWithPast(last_hidden_state=hidden)
