"""Pickers: policies that score candidates, draw by seed, or plan picks by beam search."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from leret.config.policy import PickerSettings
from leret.core.errors import PolicyError
from leret.core.files import write_atomically
from leret.core.types import STOP, Candidate, Choice, SharedInstance
from leret.policies.base import Completion, Request
from leret.policies.checkpoints import (
    PICKER_RECORD,
    PICKER_VERSION,
    check_finite,
    picker_digest,
    read_picker,
)
from leret.policies.local.batching import BatchWorker
from leret.policies.local.model import evaluation_mode
from leret.policies.local.sampling import exponentials, step_keys
from leret.policies.pickers.encoder import EncoderQ
from leret.policies.pickers.features import FeatureQ

_AT_ONCE = 2**16


class QFunction(Protocol):
    """The network of a picker and its files; each kind of picker has a different class."""

    module: nn.Module  # set by `fit` or `load`, or by the constructor for a pretrained model

    def fit(self, choices: Sequence[Choice]) -> None: ...

    def q(
        self, choices: Sequence[Choice], only: Sequence[int] | None = None, cached: bool = False
    ) -> Tensor:
        """Return Q-values (2, n) of all candidates, or of those at indices ``only``.

        ``cached`` reuses embeddings.
        """
        ...

    def renew(self) -> None:
        """Empty the cache."""

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the weights; return the ``record`` that `load` needs."""
        ...

    def load(self, directory: Path, record: dict[str, Any]) -> None: ...


Q_FUNCTIONS: dict[str, type[Any]] = {"features": FeatureQ, "encoder": EncoderQ}
"""Q-functions by kind of settings."""


class Picker(SharedInstance):
    """A policy that chooses one of a request's candidates.

    The completion's text is the candidate's id.

    A candidate's probability is softmax(Q / temperature) over all candidates, or over the best
    ``top_k``. Temperature 0 selects the best candidate. A draw depends only on its seed and the
    Q-values. Thread-safe.
    """

    def __init__(
        self, settings: PickerSettings, function: QFunction, name: str, digest: str
    ) -> None:
        self.settings = settings
        self.name = name
        self.digest = digest
        self._function = function
        self._lock = threading.Lock()
        self._worker: BatchWorker[Request, list[Completion]] = BatchWorker(
            self.complete_many, lambda waiting: [range(len(waiting))], name=f"picker {name}"
        )

    @property
    def fitted(self) -> bool:
        """True if the picker has a network; a picker from scratch gets its network from `fit`."""
        return hasattr(self._function, "module")

    @property
    def model(self) -> nn.Module:
        """The trainable network; raises PolicyError before `fit`."""
        return self._fitted().module

    @property
    def closed(self) -> bool:
        return self._worker.closed

    def fit(self, choices: Sequence[Choice]) -> None:
        """Create a new picker's network, with the vocabulary or feature scales of these choices."""
        if not self.fitted:
            self._function.fit(choices)

    def q(
        self, choices: Sequence[Choice], twin: bool = False, at: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Return each choice's Q-values with gradients: (n_candidates,) float32.

        ``twin`` returns both heads of the network, (2, n_candidates), instead of their mean.
        ``at`` gives one candidate's index per choice; only its Q-values are computed, (1,) or
        (2, 1).
        """
        sizes = [len(choice.candidates) for choice in choices]
        only = None
        if at is not None:
            starts = accumulate([0, *sizes])
            only = [start + i for start, i in zip(starts, at, strict=False)]
        values = self._fitted().q(choices, only)
        if not twin:
            values = values.mean(0)
        return list(values.split(sizes if at is None else 1, dim=-1))

    def score(self, choices: Sequence[Choice]) -> list[Tensor]:
        """Return each choice's Q-values without gradients: (n_candidates,) float32 on the CPU."""
        if not self.fitted:
            return [torch.zeros(len(choice.candidates)) for choice in choices]
        parts: dict[int, list[Choice]] = {}
        n_candidates = 0
        for choice in choices:
            n_candidates += len(choice.candidates)
            parts.setdefault(n_candidates // _AT_ONCE, []).append(choice)
        values: list[Tensor] = []
        with self._lock, torch.no_grad(), evaluation_mode(self.model):
            for part in parts.values():
                sizes = [len(choice.candidates) for choice in part]
                q_values = self._function.q(part, cached=True).mean(0).cpu()
                values += q_values.split(sizes, dim=-1)
        return values

    async def complete(self, request: Request) -> list[Completion]:
        self._choice(request)
        [future] = self._worker.submit([request])
        return await asyncio.wrap_future(future)

    def complete_many(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Complete requests synchronously.

        The batches depend only on the requests, not on timing.
        """
        choices = [self._choice(request) for request in requests]
        completions = []
        for request, choice, values in zip(requests, choices, self.score(choices), strict=True):
            completions.append(self._completions(request, choice, values))
        return completions

    def renew(self, digest: str) -> None:
        """Set the digest of the updated weights, and clear the cache."""
        self.digest = digest
        if self.fitted:
            self._function.renew()

    def clone(self) -> Picker:
        """Return an independent copy, for use as a target network."""
        copy = Picker(self.settings, deepcopy(self._function), self.name, self.digest)
        copy.renew(self.digest)
        return copy

    def save(self, directory: Path) -> None:
        """Write a directory for `open_picker`.

        Encoders are saved as sentence-transformers models.
        """
        directory.mkdir(parents=True, exist_ok=True)
        values = self._fitted().save(directory)
        record = {
            "version": PICKER_VERSION,
            "kind": self.settings.kind,
            "settings": self.settings.architecture(),
            **values,
        }
        write_atomically(directory / PICKER_RECORD, json.dumps(record, indent=1) + "\n")

    def close(self) -> None:
        self._worker.close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def _fitted(self) -> QFunction:
        if not self.fitted:
            raise PolicyError(f"picker {self.name} has no network yet; call fit(choices) first")
        return self._function

    def _choice(self, request: Request) -> Choice:
        if request.choice is None:
            raise PolicyError(
                f"picker {self.name} got a request without candidates from predictor "
                f"{request.predictor!r}, but pickers only choose candidates for leret.Pick; set a "
                "policy of a different kind for this predictor"
            )
        return request.choice

    def _completions(self, request: Request, choice: Choice, values: Tensor) -> list[Completion]:
        settings = self.settings
        if request.temperature == 0 and settings.beam > 1:
            n_picks = settings.budget - len(choice.picked)
            best = plan(self.score, choice, n_picks, settings.beam)[0].picked[0]
            draws = [(choice.candidates.index(best), 0.0)] * len(request.seeds)
        else:
            draws = draw(values, request.seeds, request.temperature, settings.top_k, request.top_p)
        completions = []
        for i, logprob in draws:
            text = choice.candidates[i].id
            value = float(values[i])
            completions.append(Completion(text, "stop", 0, 0, logprobs=(logprob,), value=value))
        return completions


def draw(
    q: Tensor,
    seeds: Sequence[int],
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> list[tuple[int, float]]:
    """Draw one candidate per seed, by the Gumbel-max trick as in `leret.policies.local.sampling`.

    Args:
        q: Q-values (n_candidates,).
        seeds: one per draw.
        temperature: 0 selects the candidate with the largest Q-value (the first if tied).
        top_k: draws from this many candidates with the largest Q-values.
        top_p: draws from the smallest set of top candidates with this total probability, after
            ``top_k``.

    Returns:
        Per draw, the candidate's index and the natural logarithm of its probability.
    """
    values = q.double().numpy()
    if temperature == 0:
        return [(int(values.argmax()), 0.0)] * len(seeds)
    weights = np.exp((values - values.max()) / temperature)
    if top_k is not None or top_p < 1:
        order = np.argsort(-values, kind="stable")
        weights[order[top_k or len(order) :]] = 0
        likeliest = weights[order] / weights.sum()
        weights[order[likeliest.cumsum() - likeliest >= top_p]] = 0
    weights /= weights.sum()
    keys = step_keys(seeds, 1)[:, 0]
    noise = exponentials(keys, len(values)).numpy()
    indices = (weights / noise).argmax(axis=1)
    logprobs = np.log(weights[indices])
    return list(zip(indices.tolist(), logprobs.tolist(), strict=True))


class Picks(NamedTuple):
    """A sequence of picks with their Q-values."""

    picked: tuple[Candidate, ...] = ()
    q_values: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """Mean of the Q-values: unlike a sum, comparable between sequences of different lengths."""
        return sum(self.q_values) / max(1, len(self.q_values))

    @property
    def stopped(self) -> bool:
        return self.picked[-1:] == (STOP,)

    def plus(self, candidate: Candidate, q_value: float) -> Picks:
        return Picks((*self.picked, candidate), (*self.q_values, q_value))


def plan(
    score: Callable[[Sequence[Choice]], list[Tensor]], choice: Choice, n_picks: int, width: int
) -> list[Picks]:
    """Plan the next ``n_picks`` picks by beam search; return the sequences best first.

    Width 1 is greedy.

    Each step scores all sequences in one batch. Of sequences with the same candidates, only the
    best is kept. ``score`` returns each choice's Q-values; ``width`` is the maximum number of
    sequences.
    """
    beam = [Picks()]
    for _ in range(max(1, min(n_picks, len(choice.candidates)))):
        grown = [picks for picks in beam if picks.stopped]
        going = [picks for picks in beam if not picks.stopped]
        choices = [_after(choice, picks.picked) for picks in going]
        for picks, after, q_values in zip(going, choices, score(choices), strict=True):
            best, indices = q_values.sort(descending=True, stable=True)
            for q_value, i in zip(best[:width].tolist(), indices[:width].tolist(), strict=True):
                grown.append(picks.plus(after.candidates[i], q_value))
        grown.sort(key=lambda picks: picks.value)
        distinct: dict[frozenset[str], Picks] = {}
        for picks in grown:
            distinct[frozenset(pick.id for pick in picks.picked)] = picks
        beam = sorted(distinct.values(), key=lambda picks: -picks.value)[:width]
    return beam


def _after(choice: Choice, picked: tuple[Candidate, ...]) -> Choice:
    if not picked:
        return choice
    picked_ids = {candidate.id for candidate in picked}
    left = [candidate for candidate in choice.candidates if candidate.id not in picked_ids]
    return replace(choice, candidates=left, picked=(*choice.picked, *picked))


def open_picker(settings: PickerSettings) -> Picker:
    """Open a picker from its settings: saved, with pretrained encoders, or from scratch."""
    saved, record = read_picker(settings)
    directory = Path(settings.model)
    make = Q_FUNCTIONS[settings.kind]
    if record is None:
        name = settings.kind
        if settings.model != "scratch":
            name = f"{name} {directory.name}"
        return Picker(saved, make(saved), name, picker_digest(settings))
    function = make(saved.model_copy(update={"model": "scratch"}))
    function.load(directory, record)
    check_finite(function.module, directory)
    return Picker(saved, function, directory.resolve().name, picker_digest(settings))
