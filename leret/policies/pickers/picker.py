"""Actors that choose: a value for each candidate, and a draw by a request's seeds."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from leret.config.policy import FeaturesSettings, PickerSettings
from leret.core import hub
from leret.core.errors import PolicyError
from leret.core.files import write_atomically
from leret.core.types import Choice, digest
from leret.core.usage import UsageMeter
from leret.policies.base import Completion, Request
from leret.policies.checkpoints import read_model_json
from leret.policies.local.batching import BatchWorker
from leret.policies.local.sampling import exponentials, step_keys
from leret.policies.pickers.beam import plan
from leret.policies.pickers.encoder import EncoderQ
from leret.policies.pickers.features import FeatureQ
from leret.rewards.functions import source_digest

RECORD = "picker.json"
"""In a picker's directory: its kind and settings."""


class QFunction(Protocol):
    """What the kinds of pickers differ in. Without ``module``, which `fit` makes, every candidate is worth 0."""

    module: nn.Module | None

    def fit(self, choices: Sequence[Choice]) -> None:
        """Make the network for choices like these; nothing where it is made."""
        ...

    def q(self, choices: Sequence[Choice], twin: bool = False, at: Sequence[int] | None = None) -> list[Tensor]:
        """As `Picker.q`; the network is there."""
        ...

    def score(self, choices: Sequence[Choice]) -> list[Tensor]:
        """The same numbers, perhaps from what was computed before; under ``torch.no_grad``."""
        ...

    def renew(self) -> None:
        """Forget what was computed with other weights."""

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the weights; returns what `load` needs beside them and the settings."""
        ...

    def load(self, directory: Path, record: dict[str, Any]) -> None:
        """Read what `save` wrote."""


Q_FUNCTIONS: dict[str, type[Any]] = {"features": FeatureQ, "encoder": EncoderQ}
"""By kind of settings, which each takes."""


class Picker:
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
        self.meter = UsageMeter(settings.price_prompt, settings.price_completion)
        self._function = function
        self._lock = threading.Lock()
        self._worker: BatchWorker[Request, list[Completion]] = BatchWorker(
            self._process, lambda waiting: [range(len(waiting))], name=f"picker {name}"
        )

    @property
    def model(self) -> nn.Module:
        """What is trained; PolicyError before `fit`."""
        return self._made().module  # type: ignore[return-value]

    @property
    def fitted(self) -> bool:
        """Whether there is a network: of a picker that starts from nothing, after `fit`."""
        return self._function.module is not None

    @property
    def closed(self) -> bool:
        return self._worker.closed

    def fit(self, choices: Sequence[Choice]) -> None:
        """Make the network of a picker that starts from nothing: its vocabulary, or the scale of its features."""
        self._function.fit(choices)

    def q(self, choices: Sequence[Choice], twin: bool = False, at: Sequence[int] | None = None) -> list[Tensor]:
        """Values with gradients: (n_candidates,) float32 a choice, or (2, n_candidates) with ``twin``.

        Each of the two rows reads half of the network's last layer; their mean is what is returned without ``twin``.
        With ``at``, a place for each choice, only the value of the candidate there: (1,) or (2, 1).
        """
        return self._made().q(choices, twin, at)

    def score(self, choices: Sequence[Choice]) -> list[Tensor]:
        """Values without gradients, in evaluation mode: (n_candidates,) float32 on the CPU a choice."""
        module = self._function.module
        if module is None:
            return [torch.zeros(len(choice.candidates)) for choice in choices]
        with self._lock, torch.no_grad():
            training = module.training
            module.eval()
            try:
                return self._function.score(choices)
            finally:
                module.train(training)

    async def complete(self, request: Request) -> list[Completion]:
        """Choose once a seed, together with whatever else is waiting."""
        return await asyncio.wrap_future(self._worker.submit([request])[0])

    def complete_many(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """`complete` for code that is not async; what is in a batch follows from the requests, not from the clock."""
        choices = [self._choice(request) for request in requests]
        values = self.score(choices)
        return [self._completions(*one) for one in zip(requests, choices, values, strict=True)]

    def renew(self, digest: str) -> None:
        """The weights have changed, and this names them now: nothing that was computed with the others is kept."""
        self.digest = digest
        self._function.renew()

    def clone(self) -> Picker:
        """A picker of its own with equal weights: a target network, say."""
        function = deepcopy(self._function)
        function.renew()
        return Picker(self.settings, function, self.name, self.digest)

    def save(self, directory: Path) -> None:
        """Write what `open_picker` opens; an encoder's folders ``state`` and ``action`` are sentence-transformers'."""
        function = self._made()
        directory.mkdir(parents=True, exist_ok=True)
        own = function.save(directory)
        record = {"kind": self.settings.kind, "settings": self.settings.architecture(), **own}
        write_atomically(directory / RECORD, json.dumps(record, indent=1) + "\n")

    def close(self) -> None:
        """Stop the worker. May be called twice."""
        self._worker.close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def __deepcopy__(self, memo: dict[int, object]) -> Picker:
        return self  # programs are deep-copied by DSPy's optimizers; the model behind them is one

    def _made(self) -> QFunction:
        if self._function.module is None:
            raise PolicyError(f"the picker {self.name} has no network yet; call fit with some choices first")
        return self._function

    def _process(self, requests: Sequence[Request]) -> list[list[Completion] | Exception]:
        return list(self.complete_many(requests))

    def _choice(self, request: Request) -> Choice:
        if request.choice is None:
            raise PolicyError(
                f"the picker {self.name} was asked for a text, and it can only choose among the candidates of a "
                "leret.Pick; name a policy that writes for this predictor"
            )
        if not request.choice.candidates or not request.seeds:
            raise PolicyError(
                f"the picker {self.name} was asked for {len(request.seeds)} of {len(request.choice.candidates)} "
                "candidates; ask for one of one at least"
            )
        return request.choice

    def _completions(self, request: Request, choice: Choice, values: Tensor) -> list[Completion]:
        if request.temperature == 0 and self.settings.beam > 1:
            best = plan(self.score, choice, self.settings.budget - len(choice.picked), self.settings.beam)[0].picked[0]
            places, logprobs = np.full(len(request.seeds), choice.candidates.index(best)), np.zeros(len(request.seeds))
        else:
            top_k = self.settings.top_k or len(values)
            places, logprobs = draw(values.numpy(), request.seeds, request.temperature, top_k, request.top_p)
        return [
            Completion(choice.candidates[i].id, "stop", 0, 0, logprobs=(logprob,), value=float(values[i]))
            for i, logprob in zip(places.tolist(), logprobs.tolist(), strict=True)
        ]


def draw(
    values: NDArray[np.float32], seeds: Sequence[int], temperature: float, top_k: int, top_p: float = 1.0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """One candidate a seed, as `leret.policies.local.sampling.choose` draws tokens.

    Args:
        values: (n_candidates,).
        seeds: of the draws, 63 bits.
        temperature: 0 takes the greatest value, the first of equal ones.
        top_k: of the greatest values are drawn from.
        top_p: of what is left, the smallest set of the likeliest with this mass.

    Returns:
        Places (n_seeds,), and the natural logarithms of the probabilities that they were drawn with (n_seeds,).
    """
    if temperature == 0:
        return np.full(len(seeds), int(values.argmax())), np.zeros(len(seeds))
    weights = np.exp((values.astype(np.float64) - values.max()) / temperature)
    if top_k < len(values) or top_p < 1:
        order = np.argsort(-values, kind="stable")
        weights[order[top_k:]] = 0
        likeliest = weights[order] / weights.sum()
        weights[order[likeliest.cumsum() - likeliest >= top_p]] = 0
    weights /= weights.sum()
    noise = exponentials(step_keys(seeds, 1)[:, 0], len(values)).numpy()
    places = (weights / noise).argmax(axis=1)
    return places, np.log(weights[places])


def open_picker(settings: PickerSettings) -> Picker:
    """The picker that settings name: one that leret saved, an encoder on a pretrained model, or one from nothing.

    Raises:
        ConfigError: the feature function cannot be loaded.
        PolicyError: the model is not there, or is of another kind.
        MissingDependency: sentence-transformers is not installed.
    """
    directory = Path(settings.model)
    if not (directory / RECORD).is_file():
        function = Q_FUNCTIONS[settings.kind](settings)
        name = settings.kind if settings.model == "scratch" else f"{settings.kind} {directory.name}"
        content = getattr(function, "content", None)  # of a pretrained model
        return Picker(settings, function, name, _digest(settings, content))
    record = read_model_json(directory / RECORD)
    if record.get("kind") != settings.kind:
        raise PolicyError(f"{directory} is a picker of kind {record.get('kind')}; set policy.kind to that")
    settings = type(settings).model_validate({**settings.model_dump(), **record["settings"]})
    function = Q_FUNCTIONS[settings.kind](settings.model_copy(update={"model": "scratch"}))
    function.load(directory, record)
    return Picker(settings, function, directory.resolve().name, _digest(settings, hub.model_digest(directory)))


def _digest(settings: PickerSettings, content: str | None) -> str:
    own = source_digest(settings.features) if isinstance(settings, FeaturesSettings) else None
    decoding = [settings.top_k, settings.beam, settings.budget]
    return digest(settings.kind, settings.architecture(), decoding, own, content)
