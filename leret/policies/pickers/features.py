"""Pickers that compute Q-values from named features of a state and a candidate.

Their network is a linear layer plus a small network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from leret.config.policy import FeaturesSettings
from leret.core.classes import load_function
from leret.core.types import Choice

Numbers = tuple[Sequence[str], NDArray[np.float32]]
"""Feature names, and feature values (n_candidates, n_features)."""


def mentions(choice: Choice) -> Numbers:
    """Return candidates' ``data``, the step, and overlap with earlier picks.

    `leret.programs.mentions` computes the data.
    """
    names: set[str] = set()
    for candidate in choice.candidates:
        names.update(candidate.data)
    columns = sorted(names)
    used: set[str] = set()
    for candidate in choice.picked:
        used.update(candidate.text.lower().split())
    step = float(len(choice.picked))
    rows = []
    for candidate in choice.candidates:
        words = set(candidate.text.lower().split())
        again = len(words & used) / len(words) if words else 0.0
        row = [candidate.data.get(name, 0.0) for name in columns]
        rows.append([*row, step, again, float(0 < again < 1)])
    return (*columns, "step", "again", "partly_again"), np.array(rows, np.float32)


FEATURES: dict[str, Callable[[Choice], Numbers]] = {"mentions": mentions}
"""Built-in feature functions.

Settings name other functions as ``module:function`` or ``FILE.py:function``.
"""

_WEIGHTS = "model.safetensors"


class FeatureNetwork(nn.Module):
    """w·x + c + v·gelu(Ax + b) of standardised x.

    The weights w, c and v start at 0, and so does every Q-value.
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
        """Map (n, n_features) to (2, n).

        Each head adds twice the sum of half the hidden units to the linear layer.
        """
        x = (features - self.mean) / self.scale
        hidden = nn.functional.gelu(self.hidden(x)) * self.out.weight
        heads: Tensor = self.linear(x).T + 2 * hidden.unflatten(1, (2, -1)).sum(2).T
        return heads


class FeatureQ:
    """Q-function of kind ``features``."""

    module: FeatureNetwork

    def __init__(self, settings: FeaturesSettings) -> None:
        self._settings = settings
        self._names: list[str] = []
        function = FEATURES.get(settings.features)
        self._function = function or load_function(settings.features, "policy.features")

    def fit(self, choices: Sequence[Choice]) -> None:
        """Create the network, and standardise each feature over these choices.

        Constant features are only centred.
        """
        names: dict[str, None] = {}
        for choice in choices:
            choice_names, _ = self._function(choice)
            names |= dict.fromkeys(choice_names)
        self._make(list(names))
        rows = np.concatenate([self._rows(choice) for choice in choices]).astype(np.float64)
        deviations = rows.std(axis=0)
        scale = np.where(deviations > 1e-6, deviations, 1.0)
        self.module.mean.copy_(torch.from_numpy(rows.mean(axis=0)))
        self.module.scale.copy_(torch.from_numpy(scale))

    def q(
        self, choices: Sequence[Choice], only: Sequence[int] | None = None, cached: bool = False
    ) -> Tensor:
        rows = np.concatenate([self._rows(choice) for choice in choices])
        if only is not None:
            rows = rows[only]
        values: Tensor = self.module(torch.from_numpy(rows))
        return values

    def renew(self) -> None:
        """Do nothing: there is no cache."""

    def save(self, directory: Path) -> dict[str, Any]:
        save_file(self.module.state_dict(), directory / _WEIGHTS)
        return {"names": self._names}

    def load(self, directory: Path, record: dict[str, Any]) -> None:
        self._make(record["names"])
        self.module.load_state_dict(load_file(directory / _WEIGHTS))

    def _make(self, names: list[str]) -> None:
        self._names = names
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            self.module = FeatureNetwork(len(names), self._settings.hidden_size)

    def _rows(self, choice: Choice) -> NDArray[np.float32]:
        """Return features in the network's order, with 0 for missing features."""
        names, rows = self._function(choice)
        if list(names) == self._names:
            return rows
        columns = dict(zip(names, rows.T, strict=True))
        missing = np.zeros(len(rows), np.float32)
        return np.stack([columns.get(name, missing) for name in self._names], axis=1)
