"""Actors that choose: a value for each candidate, a draw by a request's seeds, and a beam over several picks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate, groupby
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
from leret.policies.checkpoints import check_finite
from leret.policies.local.batching import BatchWorker
from leret.policies.local.sampling import exponentials, step_keys
from leret.policies.pickers.encoder import EncoderQ
from leret.policies.pickers.features import FeatureQ
from leret.policies.pickers.record import RECORD, VERSION, picker_digest, read_record

_AT_ONCE = 2**16


class QFunction(Protocol):
    """What the kinds of pickers differ in.

    Attributes:
        module: made by `fit` from some choices, by `load`, or of a pretrained model at once.
    """

    module: nn.Module

    def fit(self, choices: Sequence[Choice]) -> None: ...

    def q(self, choices: Sequence[Choice], only: Sequence[int] | None = None, kept: bool = False) -> Tensor:
        """Values (2, n) of the candidates of all choices, or of ``only`` some of them; ``kept``: as computed before."""
        ...

    def renew(self) -> None:
        """Forget what was kept."""

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the weights; returns what `load` needs beside them and the settings."""
        ...

    def load(self, directory: Path, record: dict[str, Any]) -> None: ...


Q_FUNCTIONS: dict[str, type[Any]] = {"features": FeatureQ, "encoder": EncoderQ}
"""By kind of settings, which each takes."""


class Picker(SharedInstance):
    """Implements ``Policy`` by choosing one of the candidates of a request; the text of a completion is its id.

    The probability of a candidate is softmax(Q / temperature) over the request's candidates, or the best ``top_k``;
    temperature 0 takes the best, of equal ones the first. A draw depends on its seed and the values alone. Safe to use
    from several threads.

    Args:
        settings: of a kind in `Q_FUNCTIONS`; what a saved picker holds stands in its own record.
        function: one of `Q_FUNCTIONS`.
        name: as reports call it.
        digest: names its weights and settings.
    """

    def __init__(self, settings: PickerSettings, function: QFunction, name: str, digest: str) -> None:
        self.settings, self.name, self.digest = settings, name, digest
        self._function = function
        self._lock = threading.Lock()
        self._worker: BatchWorker[Request, list[Completion]] = BatchWorker(
            self.complete_many, lambda waiting: [range(len(waiting))], name=f"picker {name}"
        )

    @property
    def fitted(self) -> bool:
        """Whether there is a network: of a picker that starts from nothing, after `fit`."""
        return hasattr(self._function, "module")

    @property
    def model(self) -> nn.Module:
        """What is trained; PolicyError before `fit`."""
        return self._made().module

    @property
    def closed(self) -> bool:
        return self._worker.closed

    def fit(self, choices: Sequence[Choice]) -> None:
        """Make the network of a picker that starts from nothing: its vocabulary, or the scale of its features."""
        if not self.fitted:
            self._function.fit(choices)

    def q(self, choices: Sequence[Choice], twin: bool = False, at: Sequence[int] | None = None) -> list[Tensor]:
        """Values with gradients: (n_candidates,) float32 a choice, or (2, n_candidates) with ``twin``.

        Each of the two rows reads half of the network's last layer; their mean is what is returned without ``twin``.
        With ``at``, a place for each choice, only the value of the candidate there: (1,) or (2, 1).
        """
        starts = accumulate([0, *(len(choice.candidates) for choice in choices)])
        only = None if at is None else [start + i for start, i in zip(starts, at, strict=False)]
        values = self._made().q(choices, only)
        return _split(values if twin else values.mean(0), choices if at is None else None)

    def score(self, choices: Sequence[Choice]) -> list[Tensor]:
        """Values without gradients, in evaluation mode: (n_candidates,) float32 on the CPU a choice."""
        if not self.fitted:
            return [torch.zeros(len(choice.candidates)) for choice in choices]
        with self._lock, torch.no_grad():
            training = self.model.training
            self.model.eval()
            try:
                sizes, found = accumulate(len(choice.candidates) for choice in choices), list[Tensor]()
                for _, group in groupby(zip(sizes, choices, strict=True), lambda one: one[0] // _AT_ONCE):
                    part = [choice for _, choice in group]
                    found += _split(self._function.q(part, kept=True).mean(0).cpu(), part)
                return found
            finally:
                self.model.train(training)

    async def complete(self, request: Request) -> list[Completion]:
        self._choice(request)
        return await asyncio.wrap_future(self._worker.submit([request])[0])

    def complete_many(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """`complete` for code that is not async; what is in a batch follows from the requests, not from the clock."""
        choices = [self._choice(request) for request in requests]
        values = self.score(choices)
        return [self._completions(*one) for one in zip(requests, choices, values, strict=True)]

    def renew(self, digest: str) -> None:
        """The weights have changed, and this names them now: nothing that was computed with the others is kept."""
        self.digest = digest
        if self.fitted:
            self._function.renew()

    def clone(self) -> Picker:
        """A picker of its own with equal weights: a target network, say."""
        copy = Picker(self.settings, deepcopy(self._function), self.name, self.digest)
        copy.renew(self.digest)
        return copy

    def save(self, directory: Path) -> None:
        """Write what `open_picker` opens; an encoder's folders ``state`` and ``action`` are sentence-transformers'."""
        directory.mkdir(parents=True, exist_ok=True)
        own = self._made().save(directory)
        record = {"version": VERSION, "kind": self.settings.kind, "settings": self.settings.architecture(), **own}
        write_atomically(directory / RECORD, json.dumps(record, indent=1) + "\n")

    def close(self) -> None:
        """Stop the worker. May be called twice."""
        self._worker.close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def _made(self) -> QFunction:
        if not self.fitted:
            raise PolicyError(f"the picker {self.name} has no network yet; call fit with some choices first")
        return self._function

    def _choice(self, request: Request) -> Choice:
        if request.choice is None:
            raise PolicyError(
                f"the picker {self.name} was asked for a text, and it can only choose among the candidates of a "
                "leret.Pick; name a policy that writes for this predictor"
            )
        return request.choice

    def _completions(self, request: Request, choice: Choice, values: Tensor) -> list[Completion]:
        if request.temperature == 0 and self.settings.beam > 1:
            n_picks = self.settings.budget - len(choice.picked)
            best = plan(self.score, choice, n_picks, self.settings.beam)[0].picked[0]
            drawn = [(choice.candidates.index(best), 0.0)] * len(request.seeds)
        else:
            drawn = draw(values, request.seeds, request.temperature, self.settings.top_k, request.top_p)
        return [
            Completion(choice.candidates[i].id, "stop", 0, 0, logprobs=(logprob,), value=float(values[i]))
            for i, logprob in drawn
        ]


def _split(values: Tensor, choices: Sequence[Choice] | None) -> list[Tensor]:
    return list(values.split(1 if choices is None else [len(choice.candidates) for choice in choices], dim=-1))


def draw(
    q: Tensor, seeds: Sequence[int], temperature: float, top_k: int | None = None, top_p: float = 1.0
) -> list[tuple[int, float]]:
    """One candidate a seed, by the race of `leret.policies.local.sampling`.

    Args:
        q: values (n_candidates,).
        seeds: of the draws, 63 bits.
        temperature: 0 takes the greatest value, the first of equal ones.
        top_k: of the greatest values are drawn from.
        top_p: of what is left, the smallest set of the likeliest with this mass.

    Returns:
        Of each draw the place, and the natural logarithm of the probability that it was drawn with.
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
    noise = exponentials(step_keys(seeds, 1)[:, 0], len(values)).numpy()
    places = (weights / noise).argmax(axis=1)
    return list(zip(places.tolist(), np.log(weights[places]).tolist(), strict=True))


class Picks(NamedTuple):
    """Picks in their order, each with its Q-value."""

    picked: tuple[Candidate, ...] = ()
    q_values: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """The mean of the Q-values, so that those that stopped earlier compare with others."""
        return sum(self.q_values) / max(1, len(self.q_values))


def plan(score: Callable[[Sequence[Choice]], list[Tensor]], choice: Choice, n_picks: int, width: int) -> list[Picks]:
    """Beam search over the picks that follow a choice, best first; width 1 is the greedy order.

    A step scores all sequences in one batch. Of those that picked the same candidates the best one stays.

    Args:
        score: values of each candidate of some choices.
        choice: the next one.
        n_picks: to come, at least one.
        width: sequences that are followed.
    """
    found = [Picks()]
    for _ in range(max(1, min(n_picks, len(choice.candidates)))):
        grown = [one for one in found if one.picked[-1:] == (STOP,)]
        going = [one for one in found if one.picked[-1:] != (STOP,)]
        choices = [_after(choice, one.picked) for one in going]
        for before, after, values in zip(going, choices, score(choices), strict=True):
            best, places = (part[:width].tolist() for part in values.sort(descending=True, stable=True))
            for value, i in zip(best, places, strict=True):
                grown.append(Picks((*before.picked, after.candidates[i]), (*before.q_values, value)))
        grown.sort(key=lambda one: one.value)
        found = list({frozenset(pick.id for pick in one.picked): one for one in grown}.values())
        found = sorted(found, key=lambda one: -one.value)[:width]
    return found


def _after(choice: Choice, picked: tuple[Candidate, ...]) -> Choice:
    gone = {one.id for one in picked}
    left = [one for one in choice.candidates if one.id not in gone] if picked else choice.candidates
    return replace(choice, candidates=left, picked=(*choice.picked, *picked))


def open_picker(settings: PickerSettings) -> Picker:
    """The picker that settings name: one that leret saved, an encoder on a pretrained model, or one from nothing.

    Raises:
        ConfigError: the feature function cannot be loaded.
        PolicyError: the model is not there, or is of another kind.
        MissingDependency: sentence-transformers is not installed.
    """
    (own, record), directory = read_record(settings), Path(settings.model)
    if record is None:
        name = settings.kind if settings.model == "scratch" else f"{settings.kind} {directory.name}"
        return Picker(own, Q_FUNCTIONS[settings.kind](own), name, picker_digest(settings))
    function = Q_FUNCTIONS[settings.kind](own.model_copy(update={"model": "scratch"}))
    function.load(directory, record)
    check_finite(function.module, directory)
    return Picker(own, function, directory.resolve().name, picker_digest(settings))
