"""Rows of token ids and the batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and some completions of it, each by itself a continuation of the prompt.

    Attributes:
        prompt: token ids, at least one.
        targets: token ids of each completion, the end token included; at least one completion.
    """

    prompt: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.prompt) + sum(map(len, self.targets))


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows side by side.

    Attributes:
        ids: (n_rows, n_tokens) prompt, first target, second target ..., padding.
        positions: (n_rows, n_tokens) every target goes on where the prompt ends.
        mask: (n_rows, 1, n_tokens, n_tokens) 0 where a token sees another one, a large negative number elsewhere.
        target_at: (n_labels,) flat indices of the positions that predict the targets' tokens.
        target_labels: (n_labels,) those tokens.
        prompt_at: like ``target_at``, for the prompts' own tokens.
        prompt_labels: like ``target_labels``.
        n_tokens: tokens that are not padding.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    target_at: torch.Tensor
    target_labels: torch.Tensor
    prompt_at: torch.Tensor
    prompt_labels: torch.Tensor
    n_tokens: int


def collate(rows: Sequence[Row]) -> Batch:
    """Put rows side by side; a target sees its prompt and itself, never another target."""
    n, width = len(rows), max(map(len, rows))
    ids = torch.zeros(n, width, dtype=torch.long)
    positions = torch.zeros(n, width, dtype=torch.long)
    segments = torch.full((n, width), -1, dtype=torch.long)
    target_at: list[int] = []
    prompt_at: list[int] = []
    target_labels: list[int] = []
    prompt_labels: list[int] = []
    for i, row in enumerate(rows):
        start, length = i * width, len(row.prompt)
        tokens, places, parts = list(row.prompt), list(range(length)), [0] * length
        prompt_at += range(start, start + length - 1)
        prompt_labels += row.prompt[1:]
        for j, target in enumerate(row.targets, 1):
            here = start + len(tokens)
            target_at += [start + length - 1, *range(here, here + len(target) - 1)]
            target_labels += target
            tokens += target
            places += range(length, length + len(target))
            parts += [j] * len(target)
        ids[i, : len(tokens)] = torch.tensor(tokens)
        positions[i, : len(tokens)] = torch.tensor(places)
        segments[i, : len(tokens)] = torch.tensor(parts)
    return Batch(
        ids,
        positions,
        _mask(segments),
        torch.tensor(target_at),
        torch.tensor(target_labels),
        torch.tensor(prompt_at),
        torch.tensor(prompt_labels),
        sum(map(len, rows)),
    )


def _mask(segments: torch.Tensor) -> torch.Tensor:
    """Additive mask from segment numbers: 0 the prompt, 1 .. the targets, -1 padding."""
    n, width = segments.shape
    keys, queries = segments[:, None, :], segments[:, :, None]
    sees = ((keys == 0) | (keys == queries)) & torch.ones(width, width, dtype=torch.bool).tril()
    return torch.zeros(n, 1, width, width).masked_fill(~sees[:, None], torch.finfo(torch.float32).min)
