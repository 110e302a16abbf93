"""Live index: a dense retriever that training encodes again with the picker in training."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leret.core.types import Ranking
from leret.policies.pickers.encoder import SEPARATOR
from leret.policies.pickers.picker import Picker
from leret.rollouts.environment import Environment

_ENCODERS = "index-encoders"  # folder with the picker that encoded the index


class LiveIndex:
    """The run's dense retriever until the first `encode`, then an index of a picker's encoders. Caches no rankings.

    ``found`` contains the rankings of the current round, by query and k.
    """

    def __init__(self, environment: Environment, directory: Path) -> None:
        self._first = self._current = environment  # an environment opens its engine at the first search
        self._directory = directory
        self.found: dict[tuple[str, int], Ranking] = {}
        environment.retriever = self  # for rounds and validation

    @property
    def digest(self) -> str:
        return self._current.engine.digest

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        rankings = self._current.engine.search(queries, k)
        self.found |= {(query, k): ranking for query, ranking in zip(queries, rankings, strict=True)}
        return rankings

    def encode(self, picker: Picker) -> float:
        """Replace the index; return the share of the passages in ``found`` that the same searches no longer find."""
        n_found = n_stale = 0
        found = self.found.copy()
        picker.save(self._directory / _ENCODERS)
        self._use(picker)
        for k in {k for _, k in found}:
            old = {query: ranking for (query, depth), ranking in found.items() if depth == k}
            for before, after in zip(old.values(), self.search(list(old), k), strict=True):
                n_found += len(before)
                n_stale += len({passage.doc_id for passage in before} - {passage.doc_id for passage in after})
        return n_stale / max(1, n_found)

    def save(self, checkpoint: Path) -> None:
        if self._current is not self._first:
            shutil.copytree(self._directory / _ENCODERS, checkpoint / _ENCODERS, dirs_exist_ok=True)

    def load(self, checkpoint: Path, picker: Picker) -> None:
        self._current = self._first
        if (checkpoint / _ENCODERS).is_dir():
            shutil.copytree(checkpoint / _ENCODERS, self._directory / _ENCODERS, dirs_exist_ok=True)
            self._use(picker)

    def _use(self, picker: Picker) -> None:
        """Search with the saved encoders, which read texts like the picker."""
        settings: Any = picker.settings
        limits = [settings.max_length, *(encoder.max_seq_length for encoder in picker.model.children())]
        folder = self._directory / _ENCODERS
        keys = {
            "index": None, "model": str(folder / "action"), "query_model": str(folder / "state"),
            "query_prefix": settings.query_prefix, "document_prefix": settings.document_prefix, "separator": SEPARATOR,
            "normalize": settings.similarity == "cosine", "max_length": min(filter(None, limits), default=None),
        }  # fmt: skip
        retriever = self._first.recipe.retriever.model_copy(update=keys)
        self._current = Environment(self._first.recipe.model_copy(update={"retriever": retriever}), self._directory)
        self._current.corpus = self._first.corpus
