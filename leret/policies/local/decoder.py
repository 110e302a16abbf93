"""Batched decoding for any Hugging Face causal LM with a key-value cache.

Differences from ``model.generate``: each sample has its own seed. A prompt is prefilled once for
all its samples, and a common beginning (the demonstrations of a few-shot prompt) once for all its
prompts. Finished rows leave the batch.
"""

from __future__ import annotations

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
    align_rows,
    buffered_cache,
    gather_rows,
    layers_of,
)
from leret.policies.local.sampling import choose, step_keys

MIN_PREFIX = 16  # tokens; sharing a shorter prefix costs more than it saves


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to complete ``len(seeds)`` times.

    Its first ``n_shared`` tokens can also begin other prompts.
    """

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
    """Prompts after the forward pass, left-padded: a row ends with the prompt's last token."""

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

    def at(self, index: Tensor, layers: KeyValues) -> _Running:
        rows = gather_rows(layers, index)
        return _Running(rows, self.mask[index], self.positions[index], self.length)


@dataclass
class _Rows:
    """Settings of each row being decoded.

    ``output_row`` is the row of the output tensors that it fills.
    """

    output_row: Tensor
    keys: np.ndarray
    temperature: Tensor
    top_p: Tensor
    max_tokens: Tensor

    def at(self, index: Tensor) -> _Rows:
        return _Rows(
            self.output_row[index],
            self.keys[index.cpu().numpy()],
            self.temperature[index],
            self.top_p[index],
            self.max_tokens[index],
        )


class Decoder:
    """Completes batches of prompts with one model.

    ``to_text`` decodes tokens to find stop strings; jobs without stop strings do not need it. A
    completion is decoded only after a token with the last character of a stop string.
    ``prefill_tokens`` is the maximum number of tokens per forward pass over prompts, padding
    included.
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
        self.end_ids = self._id_tensor(end_ids)
        self.suppressed = self._id_tensor(suppressed) if suppressed else None
        self.to_text = to_text
        self.prefixes = prefixes
        self.prefill_tokens = prefill_tokens
        self._texts: dict[int, str] = {}  # by token

    def _id_tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(sorted(set(ids)), dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> list[list[Generated]]:
        """Complete all prompts in one batch.

        Return one completion per seed for each job, in order.
        """
        prefilled = self._prefill(jobs)
        owners = []
        for job in jobs:
            for seed in job.seeds[: job.n_rows]:
                owners.append((job, seed))
        prompts = [job.token_ids for job, _ in owners]
        running, logits = self._start(prefilled, prompts, max(job.max_tokens for job in jobs))
        generated = iter(self._decode(running, logits, owners))
        completions = []
        for job in jobs:
            rows = list(islice(generated, job.n_rows))
            completions.append(rows * (len(job.seeds) // job.n_rows))
        return completions

    def _prefill(self, jobs: Sequence[Job]) -> list[_Prefilled]:
        groups: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for job in jobs:
            shared: tuple[int, ...] = ()
            n_shared = min(job.n_shared, len(job.token_ids) - 1)
            if self.prefixes is not None and n_shared >= MIN_PREFIX:
                shared = job.token_ids[:n_shared]
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
        n_rows = len(prompts)
        n_prefix = len(prefix)
        length = max(map(len, prompts))
        width = length - n_prefix
        ids = torch.zeros((n_rows, width), dtype=torch.long)
        mask = torch.zeros((n_rows, length), dtype=torch.bool)
        mask[:, :n_prefix] = True
        for row, prompt in enumerate(prompts):
            rest = prompt[n_prefix:]
            ids[row, width - len(rest) :] = torch.tensor(rest)
            mask[row, length - len(rest) :] = True
        ids = ids.to(self.device)
        mask = mask.to(self.device)
        cache = self._prefix_cache(prefix, n_rows)
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, n_prefix:]
        logits = self._forward(ids, mask, positions, cache)
        return _Prefilled(prompts, layers_of(cache), mask, logits)

    def _prefix_cache(self, prefix: tuple[int, ...], n_rows: int) -> Any:
        """Return a cache that starts with the prefix in each row."""
        if not prefix:
            return buffered_cache()
        layers = []
        for keys, values in self._prefix_layers(prefix):
            layers.append((keys.expand(n_rows, -1, -1, -1), values.expand(n_rows, -1, -1, -1)))
        return buffered_cache(layers, len(prefix))

    def _prefix_layers(self, prefix: tuple[int, ...]) -> KeyValues:
        assert self.prefixes is not None
        layers = self.prefixes.get(prefix)
        if layers is None:
            layers = self._prefill_chunk([prefix], ()).layers
            self.prefixes.put(prefix, layers)
        return layers

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the logits of the last slot, (n_rows, n_vocabulary) float32.

        The caller may overwrite them.
        """
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits.float()

    def _start(
        self, parts: list[_Prefilled], prompts: list[tuple[int, ...]], max_tokens: int
    ) -> tuple[_Running, Tensor]:
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(prompt, []).append(row)
        n_rows = len(prompts)
        length = max(part.mask.shape[1] for part in parts)
        mask = torch.zeros((n_rows, length + max_tokens), dtype=torch.bool, device=self.device)
        mask[:, length:] = True
        logits = torch.empty((n_rows, parts[0].logits.shape[1]), device=self.device)
        copies = []
        for part in parts:
            sources: list[int] = []
            targets: list[int] = []
            for i, prompt in enumerate(part.prompts):
                rows = rows_of[prompt]
                sources += [i] * len(rows)
                targets += rows
            source = torch.tensor(sources, device=self.device)
            target = torch.tensor(targets, device=self.device)
            mask[target, length - part.mask.shape[1] : length] = part.mask[source]
            logits[target] = part.logits[source]
            copies.append((part.layers, source, target))
        layers = align_rows(copies, n_rows, length, length + max_tokens - 1)
        positions = mask[:, :length].sum(dim=1)
        return _Running(layers, mask, positions, length), logits

    def _decode(
        self, running: _Running, logits: Tensor, owners: Sequence[tuple[Job, int]]
    ) -> list[Generated]:
        n_rows = len(owners)
        n_steps = max(job.max_tokens for job, _ in owners)
        ids = torch.zeros((n_rows, n_steps), dtype=torch.long, device=self.device)
        logprobs = torch.zeros((n_rows, n_steps), device=self.device)
        lengths = torch.zeros(n_rows, dtype=torch.long, device=self.device)
        ended = torch.zeros(n_rows, dtype=torch.bool, device=self.device)
        rows = self._rows(owners)
        alive = torch.ones(n_rows, dtype=torch.bool, device=self.device)
        cache = buffered_cache(running.layers, running.length)
        for step in range(n_steps):
            keys = rows.keys[:, step]
            chosen, logps = choose(logits, keys, rows.temperature, rows.top_p, self.suppressed)
            output_rows = rows.output_row[alive]
            ids[output_rows, step] = chosen[alive]
            logprobs[output_rows, step] = logps[alive]
            lengths[output_rows] = step + 1
            over = torch.isin(chosen, self.end_ids)
            over |= self._stopped(chosen, ids, rows, alive, owners, step + 1)
            ended[rows.output_row[alive & over]] = True
            alive &= ~over & (rows.max_tokens > step + 1)
            n_alive = int(alive.sum())
            if n_alive == 0:
                break
            # Removing rows copies the cache of the others, so wait until half have ended.
            if n_alive <= alive.numel() // 2:
                going = alive.nonzero()[:, 0]
                running = running.at(going, layers_of(cache))
                cache = buffered_cache(running.layers, running.length)
                rows = rows.at(going)
                chosen = chosen[going]
                alive = alive[going]
            running.length += 1
            mask = running.mask[:, : running.length]
            logits = self._forward(chosen[:, None], mask, running.positions[:, None], cache)
            running.positions += alive  # positions of finished rows could exceed the model's limit
        return _collect(ids, logprobs, lengths, ended)

    def _rows(self, owners: Sequence[tuple[Job, int]]) -> _Rows:
        jobs = [job for job, _ in owners]
        seeds = [seed % 2**64 for _, seed in owners]
        return _Rows(
            torch.arange(len(owners), device=self.device),
            step_keys(seeds, max(job.max_tokens for job in jobs)),
            torch.tensor([job.temperature for job in jobs], device=self.device),
            torch.tensor([job.top_p for job in jobs], device=self.device),
            torch.tensor([job.max_tokens for job in jobs], device=self.device),
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
        """Return which rows end with a stop string.

        Only rows whose last token may end one are decoded.
        """
        stopped = torch.zeros_like(alive)
        if self.to_text is None or not any(job.stop for job, _ in owners):
            return stopped
        tokens = chosen.tolist()
        indices = rows.output_row.tolist()
        for row in alive.nonzero()[:, 0].tolist():
            token = tokens[row]
            index = indices[row]
            job, _ = owners[index]
            if token not in self._texts:
                self._texts[token] = self.to_text([token])
            if any(_may_end(mark, self._texts[token]) for mark in job.stop):
                text = self.to_text(ids[index, :n_tokens].tolist())
                stopped[row] = any(mark in text for mark in job.stop)
        return stopped


def _may_end(mark: str, text: str) -> bool:
    """Return whether a token with this text may end a stop string.

    Decoding a single token strips spaces, and tokens may split other characters than ASCII.
    """
    last = mark[-1]
    return last in text or last == " " or not mark.isascii()


def _collect(ids: Tensor, logprobs: Tensor, lengths: Tensor, ended: Tensor) -> list[Generated]:
    rows = zip(ids.tolist(), logprobs.tolist(), lengths.tolist(), ended.tolist(), strict=True)
    completions = []
    for row_ids, row_logprobs, n, has_end in rows:
        finish_reason = "stop" if has_end else "length"
        completion = Generated(tuple(row_ids[:n]), tuple(row_logprobs[:n]), finish_reason)
        completions.append(completion)
    return completions
