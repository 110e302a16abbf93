"""Batched decoding for any Hugging Face causal LM with a key-value cache.

Differences from ``model.generate``: each sample has its own seed. A prompt is prefilled once for all its samples, and a
common beginning (the demonstrations of a few-shot prompt) once for all its prompts. Finished rows leave the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leret.policies.local.kv_cache import (
    KeyValues,
    PrefixCache,
    buffered_cache,
    gather_rows,
    layers_of,
    place,
)
from leret.policies.local.sampling import choose, step_keys

MIN_PREFIX = 16  # tokens; sharing a shorter prefix costs more than it saves


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to complete ``len(seeds)`` times. Its first ``n_shared`` tokens can also begin other prompts."""

    token_ids: tuple[int, ...]
    n_shared: int
    seeds: tuple[int, ...]
    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...] = ()
    tools: bool = False  # whether the completions may have native tool calls

    @property
    def n_rows(self) -> int:
        """Number of completions to decode: 1 if greedy, because all are then identical."""
        return len(self.seeds) if self.temperature > 0 else 1


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion as token ids, including the end token if there is one."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


@dataclass
class _Prefilled:
    """Prompts after the forward pass, left-padded, so that the last slot of each row is the prompt's last token."""

    prompts: list[tuple[int, ...]]
    layers: KeyValues
    mask: Tensor
    logits: Tensor


@dataclass
class _Running:
    """Rows being decoded; the first ``length`` slots of ``layers`` and ``mask`` are in use."""

    layers: KeyValues
    mask: Tensor
    positions: Tensor
    length: int


@dataclass
class _Rows:
    """Settings of each row being decoded; ``place`` is the row of the output tensors that it fills."""

    place: Tensor
    keys: np.ndarray
    temperature: Tensor
    top_p: Tensor
    max_tokens: Tensor

    def at(self, index: Tensor) -> _Rows:
        return _Rows(
            self.place[index],
            self.keys[index.cpu().numpy()],
            self.temperature[index],
            self.top_p[index],
            self.max_tokens[index],
        )


class Decoder:
    """Completes batches of prompts with one model.

    ``to_text`` decodes tokens to find stop strings; jobs without stop strings do not need it. A completion is decoded
    only after a token with the last character of a stop string. ``prefill_tokens`` is the maximum number of tokens per
    forward pass over prompts, padding included.
    """

    def __init__(
        self,
        model: Any,
        *,
        end_ids: Sequence[int],
        suppressed: Sequence[int] = (),
        to_text: Callable[[Sequence[int]], str] | None = None,
        prefixes: PrefixCache | None = None,
        prefill_tokens: int = 4096,
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.end_ids = torch.tensor(sorted(set(end_ids)), dtype=torch.long, device=self.device)
        self.suppressed = (
            torch.tensor(sorted(set(suppressed)), dtype=torch.long, device=self.device)
            if suppressed
            else None
        )
        self.to_text = to_text
        self.prefixes = prefixes
        self.prefill_tokens = prefill_tokens
        self._texts: dict[int, str] = {}  # by token
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> list[list[Generated]]:
        """Complete all prompts in one batch; return one completion per seed for each job, in order."""
        prefilled = self._prefill(jobs)
        owners = [(job, seed) for job in jobs for seed in job.seeds[: job.n_rows]]
        running, logits = self._start(
            prefilled, [job.token_ids for job, _ in owners], max(job.max_tokens for job in jobs)
        )
        generated = iter(self._decode(running, logits, owners))
        rows = [list(islice(generated, job.n_rows)) for job in jobs]
        return [each * (len(job.seeds) // job.n_rows) for job, each in zip(jobs, rows, strict=True)]

    def _prefill(self, jobs: Sequence[Job]) -> list[_Prefilled]:
        groups: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for job in jobs:
            n_shared = min(job.n_shared, len(job.token_ids) - 1)
            shared = (
                job.token_ids[:n_shared]
                if self.prefixes is not None and n_shared >= MIN_PREFIX
                else ()
            )
            groups.setdefault(shared, {})[job.token_ids] = None
        unshared: list[tuple[int, ...]] = []
        parts: list[_Prefilled] = []
        for prefix, prompts in groups.items():
            if prefix and self.prefixes is not None and self.prefixes.wanted(prefix, len(prompts)):
                parts += self._prefill_group(list(prompts), prefix)
            else:
                unshared += prompts
        return parts + self._prefill_group(unshared, ())

    def _prefill_group(
        self, prompts: list[tuple[int, ...]], prefix: tuple[int, ...]
    ) -> list[_Prefilled]:
        parts = []
        waiting = sorted(prompts, key=len)
        while waiting:
            longest = len(waiting[-1]) - len(prefix)
            n = min(len(waiting), max(1, self.prefill_tokens // longest))
            parts.append(self._prefill_chunk(waiting[-n:], prefix))
            del waiting[-n:]
        return parts

    def _prefill_chunk(self, prompts: list[tuple[int, ...]], prefix: tuple[int, ...]) -> _Prefilled:
        known = self._prefix_layers(prefix) if prefix else None
        n_prefix, width = len(prefix), max(map(len, prompts)) - len(prefix)
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros((len(prompts), n_prefix + width), dtype=torch.bool)
        mask[:, :n_prefix] = True
        for row, prompt in enumerate(prompts):
            rest = prompt[n_prefix:]
            ids[row, width - len(rest) :] = torch.tensor(rest)
            mask[row, n_prefix + width - len(rest) :] = True
        ids, mask = ids.to(self.device), mask.to(self.device)
        if known is None:
            cache = buffered_cache()
        else:
            expanded = [
                (k.expand(len(prompts), -1, -1, -1), v.expand(len(prompts), -1, -1, -1))
                for k, v in known
            ]
            cache = buffered_cache(expanded, n_prefix)
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, n_prefix:]
        logits = self._forward(ids, mask, positions, cache)
        return _Prefilled(prompts, layers_of(cache), mask, logits)

    def _prefix_layers(self, prefix: tuple[int, ...]) -> KeyValues:
        assert self.prefixes is not None
        known = self.prefixes.get(prefix)
        if known is None:
            known = self._prefill_chunk([prefix], ()).layers
            self.prefixes.put(prefix, known)
        return known

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the logits of the last slot, (n_rows, n_vocabulary) float32; the caller may overwrite them."""
        keep = {"logits_to_keep": 1} if self._keeps_last else {}
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **keep,
        )
        logits: Tensor = output.logits[:, -1]
        return logits.float()

    def _start(
        self, parts: list[_Prefilled], prompts: list[tuple[int, ...]], max_tokens: int
    ) -> tuple[_Running, Tensor]:
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(prompt, []).append(row)
        length = max(part.mask.shape[1] for part in parts)
        mask = torch.zeros(
            (len(prompts), length + max_tokens), dtype=torch.bool, device=self.device
        )
        mask[:, length:] = True
        logits = torch.empty((len(prompts), parts[0].logits.shape[1]), device=self.device)
        placed = []
        for part in parts:
            pairs = [
                (source, row)
                for source, prompt in enumerate(part.prompts)
                for row in rows_of[prompt]
            ]
            source, target = torch.tensor(pairs, device=self.device).T
            mask[target, length - part.mask.shape[1] : length] = part.mask[source]
            logits[target] = part.logits[source]
            placed.append((part.layers, source, target))
        layers = place(placed, len(prompts), length, length + max_tokens - 1)
        positions = mask[:, :length].sum(dim=1)
        return _Running(layers, mask, positions, length), logits

    def _decode(
        self, running: _Running, logits: Tensor, owners: Sequence[tuple[Job, int]]
    ) -> list[Generated]:
        n_rows, n_steps = len(owners), max(job.max_tokens for job, _ in owners)
        ids = torch.zeros((n_rows, n_steps), dtype=torch.long, device=self.device)
        logprobs = torch.zeros((n_rows, n_steps), device=self.device)
        lengths = torch.zeros(n_rows, dtype=torch.long, device=self.device)
        ended = torch.zeros(n_rows, dtype=torch.bool, device=self.device)
        rows = self._rows(owners)
        alive = torch.ones(n_rows, dtype=torch.bool, device=self.device)
        cache = buffered_cache(running.layers, running.length)
        for step in range(n_steps):
            chosen, chances = choose(
                logits, rows.keys[:, step], rows.temperature, rows.top_p, self.suppressed
            )
            ids[rows.place[alive], step] = chosen[alive]
            logprobs[rows.place[alive], step] = chances[alive]
            lengths[rows.place[alive]] = step + 1
            over = torch.isin(chosen, self.end_ids) | self._stopped(
                chosen, ids, rows, alive, owners, step + 1
            )
            ended[rows.place[alive & over]] = True
            alive &= ~over & (rows.max_tokens > step + 1)
            n_alive = int(alive.sum())
            if n_alive == 0:
                break
            if n_alive <= alive.numel() // 2:
                going = alive.nonzero()[:, 0]
                running = _Running(
                    gather_rows(layers_of(cache), going),
                    running.mask[going],
                    running.positions[going],
                    running.length,
                )
                rows, chosen, alive = rows.at(going), chosen[going], alive[going]
                cache = buffered_cache(running.layers, running.length)
            running.length += 1
            logits = self._forward(
                chosen[:, None],
                running.mask[:, : running.length],
                running.positions[:, None],
                cache,
            )
            running.positions += alive  # positions of finished rows could exceed the model's limit
        return _collect(ids, logprobs, lengths, ended)

    def _rows(self, owners: Sequence[tuple[Job, int]]) -> _Rows:
        return _Rows(
            torch.arange(len(owners), device=self.device),
            step_keys(
                [seed % 2**64 for _, seed in owners], max(job.max_tokens for job, _ in owners)
            ),
            torch.tensor([job.temperature for job, _ in owners], device=self.device),
            torch.tensor([job.top_p for job, _ in owners], device=self.device),
            torch.tensor([job.max_tokens for job, _ in owners], device=self.device),
        )

    def _stopped(
        self,
        chosen: Tensor,
        ids: Tensor,
        rows: _Rows,
        alive: Tensor,
        owners: Sequence[tuple[Job, int]],
        n_tokens: int,
    ) -> Tensor:
        """Return which rows end with a stop string; only rows whose last token may end one are decoded."""
        stopped = torch.zeros_like(alive)
        if self.to_text is None or not any(job.stop for job, _ in owners):
            return stopped
        tokens, indices = chosen.tolist(), rows.place.tolist()
        for row in alive.nonzero()[:, 0].tolist():
            token, index = tokens[row], indices[row]
            stop = owners[index][0].stop
            if token not in self._texts:
                self._texts[token] = self.to_text([token])
            # Decoding a single token strips spaces, and tokens may split other characters than ASCII.
            if any(
                mark[-1] in self._texts[token] or mark[-1] == " " or not mark.isascii()
                for mark in stop
            ):
                text = self.to_text(ids[index, :n_tokens].tolist())
                stopped[row] = any(mark in text for mark in stop)
        return stopped


def _collect(ids: Tensor, logprobs: Tensor, lengths: Tensor, ended: Tensor) -> list[Generated]:
    table = zip(ids.tolist(), logprobs.tolist(), lengths.tolist(), ended.tolist(), strict=True)
    return [
        Generated(tuple(i[:n]), tuple(p[:n]), "stop" if end else "length") for i, p, n, end in table
    ]
