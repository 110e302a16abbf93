"""Batches of token ids: padded, or packed so that completions share one forward pass over their prompt.

TRL runs the prompt of a pair twice. On a CPU, TRL also multiplies every position by the output matrix, although only
completion positions count. For policies of a few million parameters, this waste is most of the training time on a CPU.
A packed batch holds only completions, and its attention mask is a `Layout`. Hooks on the backbone replace the batch
with rows that hold prompts and completions. `RoundLoop` and TRL's trainers use the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

Ids = Sequence[int]

MODEL_TYPES = frozenset({"llama", "opt", "qwen2", "qwen3"})
"""Model types whose backbone accepts a 4D mask and positions; tests compare each type with the plain forward pass."""


class Layout(dict[str, torch.Tensor]):
    """Attention mask of a packed batch.

    Keys: ``ids``, ``mask`` and ``positions`` are the backbone's input rows (see `Packed`). ``places`` (n_sequences,
    width) holds flat indices of the positions that predict each completion. ``n_tokens`` is the total token count.
    """

    def sum(self) -> torch.Tensor:
        """Return the total token count, because trainers count tokens by summing the attention mask."""
        return self["n_tokens"]


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of prompts with their completions; a completion attends only to its prompt and itself.

    Attributes:
        ids: (n_rows, n_tokens) prompt, first completion, second completion ..., padding.
        positions: (n_rows, n_tokens) position ids; each completion's positions start after its prompt.
        mask: (n_rows, 1, n_tokens, n_tokens), 0 where a token attends to another token, else a large negative number.
        places: per prompt and completion, flat indices of the positions that predict the completion's tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    places: list[list[list[int]]]


def pack(
    trees: Sequence[tuple[Ids, Sequence[Ids]]], rows: Sequence[Sequence[int]] | None = None
) -> Packed:
    """Lay out trees, each a prompt with non-empty completions; ``rows`` has the tree indices of each row."""
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
                    places[i].append(
                        [last, *range(r * width + end, r * width + end + len(part) - 1)]
                    )
                end += len(part)
    same_branch = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    seen = (
        same_branch
        & (tree[:, None, :] == tree[:, :, None])
        & torch.ones(width, width, dtype=torch.bool).tril()
    )
    mask = torch.zeros(len(rows), 1, width, width).masked_fill(
        ~seen[:, None], torch.finfo(torch.float32).min
    )
    return Packed(ids, positions, mask, places)


def fill_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Group items into rows no longer than the longest item; return each row's item indices (first-fit decreasing).

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
    """Return a batch for a causal LM, in the format of TRL's trainers.

    Returns:
        ``input_ids``, ``attention_mask`` and ``completion_mask``, each (n_sequences, length) and right-padded. With
        ``packed`` (the model must be prepared with `share_prompts`), a sequence is the last prompt token and the
        completion, and the attention mask is a `Layout`.
    """
    heads = [prompt[-1:] if packed else prompt for prompt, _ in sequences]
    whole = [
        torch.tensor([*head, *completion])
        for head, (_, completion) in zip(heads, sequences, strict=True)
    ]
    batch: dict[str, Any] = {
        "input_ids": pad_sequence(whole, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in whole], batch_first=True),
    }
    marks = [
        (torch.arange(len(ids)) >= len(head)).long() for ids, head in zip(whole, heads, strict=True)
    ]
    batch["completion_mask"] = pad_sequence(marks, batch_first=True)
    if packed:
        batch["attention_mask"] = _layout(sequences)
    return batch


def share_prompts(model: Any) -> bool:
    """Add hooks so that the model accepts packed batches; return False if its type is not in `MODEL_TYPES`."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    if inner.config.model_type not in MODEL_TYPES or getattr(
        inner.config, "use_sliding_window", False
    ):
        return False
    places: list[torch.Tensor] = []

    def before(
        module: Any, args: Any, arguments: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        layout = arguments.get("attention_mask")
        if not isinstance(layout, Layout):
            return None
        places[:] = [layout["places"]]
        rows = {
            "input_ids": layout["ids"],
            "attention_mask": layout["mask"],
            "position_ids": layout["positions"],
        }
        return args, arguments | rows

    def after(module: Any, args: Any, output: Any) -> Any:
        if places:
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[places.pop()]
        return output

    backbone = (
        inner.get_decoder()
    )  # the module that the LM head model calls; for OPT it is not base_model
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
    return Layout(
        ids=packed.ids,
        mask=packed.mask,
        positions=packed.positions,
        places=table,
        n_tokens=n_tokens,
    )
