"""Batches of token ids: padded, or packed so that completions share a pass over their prompt.

TRL runs the prompt of a pair twice. On a CPU, TRL also multiplies every position by the output
matrix, although only completion positions count. For policies of a few million parameters, this
waste is most of the training time on a CPU. A packed batch holds only completions, and its
attention mask is a `Layout`. Hooks on the backbone replace the batch with rows that hold prompts
and completions. `RoundLoop` and TRL's trainers use the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from leret.policies.local.model import base_network

Ids = Sequence[int]

MODEL_TYPES = frozenset({"llama", "opt", "qwen2", "qwen3"})
"""Model types whose backbone accepts a 4D mask and positions; tests compare each type with the
plain forward pass."""


class Layout(dict[str, torch.Tensor]):
    """Attention mask of a packed batch.

    Keys: ``ids``, ``mask`` and ``positions`` are the backbone's input rows (see `Packed`).
    ``indices`` (n_sequences, width) holds flat indices of the positions that predict each
    completion. ``n_tokens`` is the total token count.
    """

    def sum(self) -> torch.Tensor:
        """Return the total token count: trainers count tokens by summing the attention mask."""
        return self["n_tokens"]


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of prompts with their completions; a completion attends only to its prompt and itself.

    Attributes:
        ids: (n_rows, n_tokens) prompt, first completion, second completion ..., padding.
        positions: (n_rows, n_tokens) position ids; each completion's positions start after its
            prompt.
        mask: (n_rows, 1, n_tokens, n_tokens), 0 where a token attends to another token, else a
            large negative number.
        indices: per prompt and completion, flat indices of the positions that predict the
            completion's tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    indices: list[list[list[int]]]


def pack(
    trees: Sequence[tuple[Ids, Sequence[Ids]]], rows: Sequence[Sequence[int]] | None = None
) -> Packed:
    """Lay out trees, each a prompt with non-empty completions.

    ``rows`` has the tree indices of each row.
    """
    rows = rows or [[i] for i in range(len(trees))]
    lengths = [len(prompt) + sum(map(len, completions)) for prompt, completions in trees]
    width = 0
    for row in rows:
        width = max(width, sum(lengths[i] for i in row))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.zeros_like(ids)
    tree = torch.full_like(ids, -1)
    branch = torch.full_like(ids, -1)
    indices: list[list[list[int]]] = [[] for _ in trees]
    for r, row in enumerate(rows):
        end = 0
        for i in row:
            prompt, completions = trees[i]
            last = r * width + end + len(prompt) - 1
            for j, part in enumerate((prompt, *completions)):
                span = slice(end, end + len(part))
                ids[r, span] = torch.tensor(part, dtype=torch.long)
                positions[r, span] = torch.arange(len(part))
                tree[r, span] = i
                branch[r, span] = j
                if j > 0:
                    positions[r, span] += len(prompt)
                    first = r * width + end
                    indices[i].append([last, *range(first, first + len(part) - 1)])
                end += len(part)
    return Packed(ids, positions, _attention_mask(tree, branch), indices)


def _attention_mask(tree: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    """Return the mask from each token's tree, and its branch: 0 in the prompt."""
    n_rows, width = tree.shape
    in_prompt = branch[:, None, :] == 0
    same_branch = branch[:, None, :] == branch[:, :, None]
    same_tree = tree[:, None, :] == tree[:, :, None]
    earlier = torch.ones(width, width, dtype=torch.bool).tril()
    seen = (in_prompt | same_branch) & same_tree & earlier
    mask = torch.zeros(n_rows, 1, width, width)
    return mask.masked_fill(~seen[:, None], torch.finfo(torch.float32).min)


def fill_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Group items into rows no longer than the longest item.

    Return each row's item indices (first-fit decreasing).

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
        ``input_ids``, ``attention_mask`` and ``completion_mask``, each (n_sequences, length) and
        right-padded. With ``packed`` (the model must be prepared with `share_prompts`), a sequence
        is the last prompt token and the completion, and the attention mask is a `Layout`.
    """
    ids = []
    attended = []
    in_completion = []
    for prompt, completion in sequences:
        head = prompt[-1:] if packed else prompt
        row = torch.tensor([*head, *completion])
        ids.append(row)
        attended.append(torch.ones_like(row))
        in_completion.append((torch.arange(len(row)) >= len(head)).long())
    batch: dict[str, Any] = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence(attended, batch_first=True),
        "completion_mask": pad_sequence(in_completion, batch_first=True),
    }
    if packed:
        batch["attention_mask"] = _layout(sequences)
    return batch


def share_prompts(model: Any) -> bool:
    """Add hooks so that the model accepts packed batches.

    Return False if its type is not in `MODEL_TYPES`.
    """
    inner = base_network(model)
    config = inner.config
    if config.model_type not in MODEL_TYPES or getattr(config, "use_sliding_window", False):
        return False
    indices: list[torch.Tensor] = []

    def before(
        module: Any, args: Any, arguments: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        layout = arguments.get("attention_mask")
        if not isinstance(layout, Layout):
            return None
        indices[:] = [layout["indices"]]
        rows = {
            "input_ids": layout["ids"],
            "attention_mask": layout["mask"],
            "position_ids": layout["positions"],
        }
        return args, arguments | rows

    def after(module: Any, args: Any, output: Any) -> Any:
        if indices:
            hidden = output.last_hidden_state.flatten(0, 1)
            output.last_hidden_state = hidden[indices.pop()]
        return output

    # The module that the LM head model calls; for OPT it is not base_model.
    backbone = inner.get_decoder()
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
    by_sequence = {}
    for (prompt, completions), by_completion in zip(branches, packed.indices, strict=True):
        for completion, indices in zip(completions, by_completion, strict=True):
            by_sequence[prompt, completion] = torch.tensor(indices)
    columns = [by_sequence[tuple(prompt), tuple(completion)] for prompt, completion in sequences]
    table = pad_sequence(columns, batch_first=True)
    n_tokens = sum(len(prompt) + len(completion) for prompt, completion in sequences)
    return Layout(
        ids=packed.ids,
        mask=packed.mask,
        positions=packed.positions,
        # One more column, because the last token of a completion predicts nothing.
        indices=torch.nn.functional.pad(table, (0, 1)),
        n_tokens=torch.tensor(n_tokens),
    )
