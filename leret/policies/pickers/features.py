"""Pickers over named numbers of (state, candidate): a linear layer beside a small network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from leret.config.policy import FeaturesSettings
from leret.core.errors import PolicyError
from leret.core.types import Choice
from leret.rewards.functions import load_function

Numbers = tuple[tuple[str, ...], NDArray[np.float32]]
"""Names of features, and (n_candidates, n_features)."""


def mentions(choice: Choice) -> Numbers:
    """The numbers that `leret.programs.mentions` keeps in the candidates' ``data``, and the picks made before."""
    names = tuple(sorted({name for one in choice.candidates for name in one.data}))
    step = float(len(choice.picked))
    rows = [[*[one.data.get(name, 0.0) for name in names], step] for one in choice.candidates]
    return (*names, "step"), np.array(rows, np.float32)


FEATURES: Mapping[str, Callable[[Choice], Numbers]] = {"mentions": mentions}
"""Shipped feature functions; a user's own is named ``module:function`` or ``FILE.py:function``."""

_WEIGHTS = "model.safetensors"


class FeatureNetwork(nn.Module):
    """w·x + v·gelu(Ax + b) of standardised features x; w and v start at 0, so that every candidate is worth the same.

    The two heads share the linear layer, and read half of the hidden units each.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, n_features: int, hidden_size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_features))
        self.register_buffer("scale", torch.ones(n_features))
        self.linear = nn.Linear(n_features, 1)
        self.hidden = nn.Linear(n_features, hidden_size)
        self.out = nn.Linear(hidden_size, 1, bias=False)
        for weights in (self.linear.weight, self.linear.bias, self.out.weight):
            nn.init.zeros_(weights)

    def forward(self, features: Tensor) -> Tensor:
        """(n, n_features) to (2, n), a row a head."""
        x = (features - self.mean) / self.scale
        hidden = nn.functional.gelu(self.hidden(x)) * self.out.weight
        heads: Tensor = self.linear(x).T + 2 * hidden.unflatten(1, (2, -1)).sum(2).T
        return heads


class FeatureQ:
    """The kind ``features`` of a picker."""

    def __init__(self, settings: FeaturesSettings) -> None:
        if settings.model != "scratch":
            raise PolicyError(
                f"policy.model: {settings.model} holds no picker of kind features; name a directory that "
                "`leret train` wrote, or leave it out to start from nothing"
            )
        self.module: FeatureNetwork | None = None
        self._settings = settings
        self._function = FEATURES.get(settings.features) or load_function(settings.features, "policy.features")
        self._names: tuple[str, ...] = ()

    def fit(self, choices: Sequence[Choice]) -> None:
        """Take mean and standard deviation of each feature; one that is the same everywhere only loses its mean."""
        if self.module is not None:
            return
        found = [self._function(choice) for choice in choices]
        self._names = tuple(dict.fromkeys(name for names, _ in found for name in names))
        rows = np.concatenate([self._aligned(*one) for one in found]).astype(np.float64)
        deviations = rows.std(axis=0)
        self._make()
        assert self.module is not None
        self.module.mean.copy_(torch.from_numpy(rows.mean(axis=0)))
        self.module.scale.copy_(torch.from_numpy(np.where(deviations > 1e-6, deviations, 1.0)))

    def q(self, choices: Sequence[Choice], twin: bool = False, at: Sequence[int] | None = None) -> list[Tensor]:
        assert self.module is not None
        found = [self._aligned(*self._function(choice)) for choice in choices]
        if at is not None:
            found = [rows[[i]] for rows, i in zip(found, at, strict=True)]
        device = self.module.mean.device
        heads = self.module(torch.from_numpy(np.concatenate(found)).to(device))
        sizes = [len(rows) for rows in found]
        return list((heads if twin else heads.mean(0)).split(sizes, dim=-1))

    def score(self, choices: Sequence[Choice]) -> list[Tensor]:
        return [values.cpu() for values in self.q(choices)]

    def renew(self) -> None:
        """Nothing is kept."""

    def save(self, directory: Path) -> dict[str, Any]:
        from safetensors.torch import save_file

        assert self.module is not None
        save_file({name: value.cpu().contiguous() for name, value in self.module.state_dict().items()},
                  directory / _WEIGHTS)  # fmt: skip
        return {"names": self._names}

    def load(self, directory: Path, record: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        self._names = tuple(record["names"])
        self._make()
        assert self.module is not None
        self.module.load_state_dict(load_file(directory / _WEIGHTS))

    def _make(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            self.module = FeatureNetwork(len(self._names), self._settings.hidden_size)

    def _aligned(self, names: tuple[str, ...], rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The columns that the network knows, in its order; 0 where a choice has none."""
        if names == self._names:
            return rows
        places = {name: i for i, name in enumerate(names)}
        whole = np.zeros((len(rows), len(self._names)), np.float32)
        for column, name in enumerate(self._names):
            if name in places:
                whole[:, column] = rows[:, places[name]]
        return whole
