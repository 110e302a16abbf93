"""Batches of token ids: padded, or packed so that a prompt runs once for all of its completions.

TRL runs the prompt of a pair twice, and outside GPUs multiplies every position with the output matrix, although only
those of completions count. For a policy of a few million parameters on a CPU this is most of the time. A packed batch
holds only completions; hooks on the backbone replace its attention mask, a `Layout`, by rows of prompts with
completions. Our loop and TRL's trainers use the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

Ids = Sequence[int]

MODEL_TYPES = frozenset({"llama", "opt", "qwen2", "qwen3"})
"""Model types with backbones that take a 4D mask and positions; tests compare each with the plain forward."""


class Layout(dict[str, torch.Tensor]):
    """Attention mask of a packed batch.

    Keys: ``ids``, ``mask`` and ``positions`` of the rows that the backbone runs (`Packed`); ``places``, (n_sequences,
    width) flat indices of the positions that predict each completion; ``n_tokens`` of all sequences.
    """

    def sum(self) -> torch.Tensor:
        """Return the tokens of all sequences, which trainers count by the attention mask."""
        return self["n_tokens"]


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of prompts with their completions; a completion sees only its prompt and itself.

    Attributes:
        ids: (n_rows, n_tokens) prompt, first completion, second completion ..., padding.
        positions: (n_rows, n_tokens); those of every completion follow its prompt's.
        mask: (n_rows, 1, n_tokens, n_tokens), 0 where a token sees another one, a large negative number elsewhere.
        places: by prompt and completion, flat indices of the positions that predict the completion's tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    places: list[list[list[int]]]


def pack(trees: Sequence[tuple[Ids, Sequence[Ids]]], rows: Sequence[Sequence[int]] | None = None) -> Packed:
    """Lay out prompts with their completions of at least one token; ``rows`` lists the trees that share a row."""
    rows = rows or [[i] for i in range(len(trees))]
    lengths = [len(prompt) + sum(map(len, completions)) for prompt, completions in trees]
    width = max(sum(lengths[i] for i in row) for row in rows)
    ids, positions = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    tree, branch = (torch.full((len(rows), width), -1, dtype=torch.long) for _ in range(2))
    places: list[list[list[int]]] = [[] for _ in trees]
    for r, row in enumerate(rows):
        end = 0
        for i in row:
            prompt, completions = trees[i]
            last = r * width + end + len(prompt) - 1
            for j, part in enumerate((prompt, *completions)):
                span = slice(end, end + len(part))
                ids[r, span] = torch.tensor(part, dtype=torch.long)
                positions[r, span] = torch.arange(len(part)) + (len(prompt) if j else 0)
                tree[r, span], branch[r, span] = i, j
                if j:
                    places[i].append([last, *range(r * width + end, r * width + end + len(part) - 1)])
                end += len(part)
    same_branch = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    seen = same_branch & (tree[:, None, :] == tree[:, :, None]) & torch.ones(width, width, dtype=torch.bool).tril()
    mask = torch.zeros(len(rows), 1, width, width).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    return Packed(ids, positions, mask, places)


def fill_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Fill rows no longer than the longest item, by first fit of the longest first.

    >>> fill_rows([9, 2, 8, 7])
    [[0], [2], [3, 1]]
    """
    room: list[int] = []
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        r = next((r for r, free in enumerate(room) if free >= lengths[i]), len(rows))
        if r == len(rows):
            room.append(max(lengths))
            rows.append([])
        room[r] -= lengths[i]
        rows[r].append(i)
    return rows


def collate(sequences: Sequence[tuple[Ids, Ids]], pad: int, *, packed: bool) -> dict[str, Any]:
    """Return a batch for a causal LM, as TRL's trainers take it.

    Returns:
        ``input_ids``, ``attention_mask`` and ``completion_mask``, (n_sequences, length), right-padded, of whole
        sequences. ``packed``, for a model prepared by `share_prompts`: of completions after the last token of their
        prompts, with a `Layout` as the mask.
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
        batch["attention_mask"] = _layout(sequences)
    return batch


def share_prompts(model: Any) -> bool:
    """Let a model take packed batches, by hooks on its backbone; return False for other types than `MODEL_TYPES`."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    if inner.config.model_type not in MODEL_TYPES or getattr(inner.config, "use_sliding_window", False):
        return False
    places: list[torch.Tensor] = []

    def before(module: Any, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        layout = arguments.get("attention_mask")
        if not isinstance(layout, Layout):
            return None
        places[:] = [layout["places"]]
        rows = {"input_ids": layout["ids"], "attention_mask": layout["mask"], "position_ids": layout["positions"]}
        return args, arguments | rows

    def after(module: Any, args: Any, output: Any) -> Any:
        if places:
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[places.pop()]
        return output

    backbone = inner.get_decoder()  # called by the model with a head; OPT's is not its base_model
    backbone.register_forward_pre_hook(before, with_kwargs=True)
    backbone.register_forward_hook(after)
    return True


def _layout(sequences: Sequence[tuple[Ids, Ids]]) -> Layout:
    trees: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    for prompt, completion in sequences:
        trees.setdefault(tuple(prompt), {})[tuple(completion)] = None
    branches = [(prompt, list(completions)) for prompt, completions in trees.items()]
    rows = fill_rows([len(prompt) + sum(map(len, completions)) for prompt, completions in branches])
    packed = pack(branches, rows)
    places_of = {
        (prompt, completion): torch.tensor(places)
        for (prompt, completions), by_completion in zip(branches, packed.places, strict=True)
        for completion, places in zip(completions, by_completion, strict=True)
    }
    places = [places_of[tuple(prompt), tuple(completion)] for prompt, completion in sequences]
    width = 1 + max(map(len, places))  # the last token of a completion predicts nothing
    table = torch.stack([torch.nn.functional.pad(one, (0, width - len(one))) for one in places])
    n_tokens = torch.tensor(sum(len(prompt) + len(completion) for prompt, completion in sequences))
    return Layout(ids=packed.ids, mask=packed.mask, positions=packed.positions, places=table, n_tokens=n_tokens)
