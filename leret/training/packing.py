"""Batches of token ids: padded, or packed so that a prompt runs once for all of its completions.

TRL runs a pair as two sequences, so the prompt, by far the longest part, twice, and pads all of a batch to its longest
row; outside GPUs it multiplies every position with the output matrix, though only those of completions count. For a
policy of a few million parameters on a CPU these are most of the time. A packed batch shows TRL the completions alone;
hooks on the model's backbone put the prompts before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

Ids = Sequence[int]

PACKED = "packed"
"""A batch's key, and the backbone's argument, of what its rows are; or an attribute of its ``input_ids``."""
_TESTED = frozenset({"llama", "opt", "qwen2", "qwen3"})
"""Model types whose backbones take a mask of their own and positions: the tests compare them with the plain forward."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Prompts with their completions side by side; a completion sees its prompt and itself, never another one.

    Attributes:
        ids: (n_rows, n_tokens) prompt, first completion, second completion ..., padding.
        positions: (n_rows, n_tokens); every completion goes on where its prompt ends.
        mask: (n_rows, 1, n_tokens, n_tokens) 0 where a token sees another one, a large negative number elsewhere.
        places: by prompt and completion: flat indices of the positions that predict the completion's tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    places: list[list[list[int]]]


def pack(trees: Sequence[tuple[Ids, Sequence[Ids]]], rows: Sequence[Sequence[int]] | None = None) -> Packed:
    """Lay out prompts, each with its completions of one token at least; ``rows``: the trees that share a row."""
    rows = rows or [[i] for i in range(len(trees))]
    width = max(sum(_length(trees[i]) for i in row) for row in rows)
    ids, positions = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    tree, branch = (torch.full((len(rows), width), -1, dtype=torch.long) for _ in range(2))
    places: list[list[list[int]]] = [[] for _ in trees]
    for r, row in enumerate(rows):
        end = 0
        for i in row:
            prompt, completions = trees[i]
            last = r * width + end + len(prompt) - 1
            for j, part in enumerate((prompt, *completions)):
                here = slice(end, end + len(part))
                ids[r, here] = torch.tensor(part, dtype=torch.long)
                positions[r, here] = torch.arange(len(part)) + (len(prompt) if j else 0)
                tree[r, here], branch[r, here] = i, j
                if j:
                    places[i].append([last, *range(r * width + end, r * width + end + len(part) - 1)])
                end += len(part)
    same_branch = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    seen = same_branch & (tree[:, None, :] == tree[:, :, None]) & torch.ones(width, width, dtype=torch.bool).tril()
    mask = torch.zeros(len(rows), 1, width, width).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    return Packed(ids, positions, mask, places)


def fill_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Items in rows no longer than the longest item, by first fit of the longest first.

    >>> fill_rows([9, 2, 8, 7])
    [[0], [2], [3, 1]]
    """
    room: list[int] = []
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        r = next((r for r, free in enumerate(room) if free >= lengths[i]), len(rows))
        if r == len(rows):
            room.append(max(lengths))
            rows.append([])
        room[r] -= lengths[i]
        rows[r].append(i)
    return rows


def collate(sequences: Sequence[tuple[Ids, Ids]], pad: int, *, packed: bool) -> dict[str, Any]:
    """A batch for TRL's trainers.

    Args:
        sequences: prompt and completion each.
        pad: id of the padding token.
        packed: for a model that `share_prompts` has prepared.

    Returns:
        ``input_ids``, ``attention_mask`` and ``completion_mask``, (n_sequences, length), right-padded: of whole
        sequences, or, packed, of completions after the last token of their prompts.
    """
    heads = [prompt[-1:] if packed else prompt for prompt, _ in sequences]
    whole = [torch.tensor([*head, *completion]) for head, (_, completion) in zip(heads, sequences, strict=True)]
    batch: dict[str, Any] = {
        "input_ids": pad_sequence(whole, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in whole], batch_first=True),
    }
    marks = [(torch.arange(len(ids)) >= len(head)).long() for ids, head in zip(whole, heads, strict=True)]
    batch["completion_mask"] = pad_sequence(marks, batch_first=True)
    if packed:
        batch[PACKED] = _packed(sequences)
    return batch


def share_prompts(model: Any) -> bool:
    """Let a model take packed batches, by hooks on its backbone.

    Returns:
        Whether the model is of a kind that this is tested for; others are left as they are.
    """
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    if inner.config.model_type not in _TESTED or getattr(inner.config, "use_sliding_window", False):
        return False
    places: list[torch.Tensor] = []

    def before(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        packed = given.pop(PACKED, None) or getattr(given.get("input_ids"), PACKED, None)
        if packed is None:
            return None
        places[:] = [packed["places"]]
        own = {"input_ids": packed["ids"], "attention_mask": packed["mask"], "position_ids": packed["positions"]}
        return args, given | own

    def after(module: Any, args: Any, output: Any) -> Any:
        if places:
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[places.pop()]
        return output

    backbone = inner.get_decoder()  # what the model with a head calls: of OPT that is not its base_model
    backbone.register_forward_pre_hook(before, with_kwargs=True)
    backbone.register_forward_hook(after)
    return True


def _packed(sequences: Sequence[tuple[Ids, Ids]]) -> dict[str, torch.Tensor]:
    trees: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    for prompt, completion in sequences:
        trees.setdefault(tuple(prompt), {})[tuple(completion)] = None
    laid = [(prompt, list(completions)) for prompt, completions in trees.items()]
    packed = pack(laid, fill_rows([_length(tree) for tree in laid]))
    known = {
        (prompt, completion): torch.tensor(places)
        for (prompt, completions), by_completion in zip(laid, packed.places, strict=True)
        for completion, places in zip(completions, by_completion, strict=True)
    }
    found = [known[tuple(prompt), tuple(completion)] for prompt, completion in sequences]
    width = 1 + max(len(places) for places in found)  # the last token of a completion has a place, that nothing reads
    table = torch.stack([torch.nn.functional.pad(places, (0, width - len(places))) for places in found])
    return {"ids": packed.ids, "mask": packed.mask, "positions": packed.positions, "places": table}


def _length(tree: tuple[Ids, Sequence[Ids]]) -> int:
    return len(tree[0]) + sum(map(len, tree[1]))
