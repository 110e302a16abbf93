"""Live index: a dense retriever that training encodes again with the picker in training."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leret.core.types import Ranking
from leret.policies.pickers.encoder import SEPARATOR
from leret.policies.pickers.picker import Picker
from leret.retrieval.base import CallableRetriever, Retriever
from leret.retrieval.load import load_retriever
from leret.rollouts.environment import Environment

_ENCODERS = "index-encoders"  # folder with the picker that encoded the index, in a checkpoint and in ``directory``


class LiveIndex(CallableRetriever):
    """The run's dense retriever, replaced by an index that a picker's encoders compute. Rankings are not cached.

    ``found`` contains the rankings of the current round, by query and k.
    """

    def __init__(self, environment: Environment, directory: Path) -> None:
        self._environment, self._directory = environment, directory
        self._settings: Any = None  # of the picker's index; None: the run's index is in use
        self._retriever: Retriever | None = None
        self.found: dict[tuple[str, int], Ranking] = {}

    @property
    def digest(self) -> str:
        return self._open().digest

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        rankings = self._open().search(queries, k)
        self.found |= {(query, k): ranking for query, ranking in zip(queries, rankings, strict=True)}
        return rankings

    def encode(self, picker: Picker) -> float:
        """Replace the index, and return the share of the passages in ``found`` that the same searches no longer find.

        NaN if nothing was found.
        """
        n_found = n_stale = 0
        found = self.found.copy()
        picker.save(self._directory / _ENCODERS)
        self._use(picker)
        for k in {k for _, k in found}:
            old = {query: ranking for (query, depth), ranking in found.items() if depth == k}
            for before, after in zip(old.values(), self.search(list(old), k), strict=True):
                n_found += len(before)
                n_stale += len({passage.doc_id for passage in before} - {passage.doc_id for passage in after})
        return n_stale / n_found if n_found else float("nan")

    def save(self, checkpoint: Path) -> None:
        if self._settings is not None:
            shutil.copytree(self._directory / _ENCODERS, checkpoint / _ENCODERS, dirs_exist_ok=True)

    def load(self, checkpoint: Path, picker: Picker) -> None:
        self._settings = self._retriever = None
        if (checkpoint / _ENCODERS).is_dir():
            shutil.copytree(checkpoint / _ENCODERS, self._directory / _ENCODERS, dirs_exist_ok=True)
            self._use(picker)

    def _use(self, picker: Picker) -> None:
        """Set the index of the saved encoders, which read texts like the picker; the first search builds the index."""
        settings: Any = picker.settings
        limits = [settings.max_length, *(encoder.max_seq_length for encoder in picker.model.children())]
        self._retriever, self._settings = (
            None,
            self._environment.recipe.retriever.model_copy(
                update={
                    "index": None,
                    "model": str(self._directory / _ENCODERS / "action"),
                    "query_model": str(self._directory / _ENCODERS / "state"),
                    "query_prefix": settings.query_prefix,
                    "document_prefix": settings.document_prefix,
                    "separator": SEPARATOR,
                    "normalize": settings.similarity == "cosine",
                    "max_length": min(filter(None, limits), default=None),
                }
            ),
        )

    def _open(self) -> Retriever:
        if self._settings is None:
            return self._environment.engine
        if self._retriever is None:
            self._retriever = load_retriever(self._settings, self._environment.corpus, self._directory / "index")
        return self._retriever
