"""Two engines over one corpus, their rankings fused.

::

    manifest.json, documents.*
    first/      an index directory of the first engine
    second/     and of the second; their documents are links to the ones above where the disk allows it
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from leret.config.retriever import HybridSettings
from leret.core.errors import RetrievalError
from leret.core.progress import Progress
from leret.core.types import Ranking, digest
from leret.retrieval.base import Documents, Retriever, checked
from leret.retrieval.fusion import reciprocal_ranks, weighted_sum
from leret.retrieval.index.documents import DOCUMENT_FILES, StoredDocuments
from leret.retrieval.index.manifest import Engine, Manifest, fitting_documents, read_manifest, write_manifest

FOLDERS = ("first", "second")
"""Where the two indexes are."""


@dataclass(frozen=True)
class Fusion:
    """How two rankings become one; see `leret.config.retriever.HybridSettings`."""

    method: str = "rrf"
    weights: tuple[float, float] = (1.0, 1.0)
    rank_constant: float = 60.0
    depth: int = 100

    def settings(self) -> dict[str, Any]:
        """All that decides the fused ranking."""
        return {
            "fusion": self.method,
            "weights": list(self.weights),
            "rank_constant": self.rank_constant,
            "depth": self.depth,
        }

    def fused(self, rankings: Sequence[Ranking]) -> Ranking:
        """One ranking from two."""
        if self.method == "rrf":
            return reciprocal_ranks(rankings, self.weights, self.rank_constant)
        return weighted_sum(rankings, self.weights)


class Hybrid:
    """Asks two retrievers, and fuses what they answer. Equal scores stand in the first one's order, then the second's.

    Args:
        retrievers: two, of one corpus.
        fusion: how.
        n_documents: of the corpus.
        digest: of the whole.
    """

    def __init__(self, retrievers: Sequence[Retriever], fusion: Fusion, n_documents: int, digest: str) -> None:
        self._retrievers = tuple(retrievers)
        self._fusion = fusion
        self._n_documents = n_documents
        self.digest = digest

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query.

        Args:
            queries: any strings; a query that neither engine finds anything for has an empty ranking.
            k: documents a query, at least 1; may be more than there are.

        Returns:
            One ranking a query, in the order of the queries; fused scores, not increasing.

        Raises:
            RetrievalError: ``k`` is less than 1, or an engine could not answer.
        """
        k = checked(k, self._n_documents)
        depth = max(k, self._fusion.depth)
        found = [retriever.search(queries, depth) for retriever in self._retrievers]
        return [self._fusion.fused(pair)[:k] for pair in zip(*found, strict=True)]


@dataclass(frozen=True)
class HybridEngine:
    """Builds and opens hybrid indexes.

    Attributes:
        engines: two.
        fusion: how their rankings become one.
    """

    engines: tuple[Engine, Engine]
    fusion: Fusion
    kind: ClassVar[str] = "hybrid"
    resumable: ClassVar[bool] = True

    @classmethod
    def of(cls, settings: HybridSettings, engines: tuple[Engine, Engine]) -> HybridEngine:
        """From a recipe and the engines that it names."""
        return cls(engines, Fusion(settings.fusion, settings.weights, settings.rank_constant, settings.depth))

    @property
    def packages(self) -> tuple[str, ...]:
        """Of both engines."""
        return tuple(dict.fromkeys(package for engine in self.engines for package in engine.packages))

    def settings(self) -> dict[str, Any]:
        """All that decides the rankings."""
        parts = [{"kind": engine.kind, **engine.settings()} for engine in self.engines]
        return {"engines": parts, **self.fusion.settings()}

    def places(self) -> dict[str, str]:
        """Those of both engines stand in their own manifests."""
        return {}

    def digest(self, corpus: str) -> str:
        """Of the retriever."""
        return digest("hybrid", [engine.digest(corpus) for engine in self.engines], self.fusion.settings())

    def write(self, corpus: Documents, directory: Path, told: Progress) -> None:
        """Build both indexes; one that an earlier build finished is left as it is."""
        for name, engine in zip(FOLDERS, self.engines, strict=True):
            folder = directory / name
            planned = Manifest.planned(engine, corpus)
            if _finished(folder, planned):
                continue
            if not engine.resumable:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            for file in DOCUMENT_FILES:
                _link(directory / file, folder / file)
            engine.write(corpus, folder, told)
            write_manifest(planned, folder)

    def open(self, directory: Path, documents: StoredDocuments) -> Hybrid:
        """A saved index.

        Raises:
            RetrievalError: one of the two cannot be opened, or is of another corpus.
        """
        retrievers = []
        for name, engine in zip(FOLDERS, self.engines, strict=True):
            folder = directory / name
            manifest = read_manifest(folder)
            if manifest.corpus != documents.digest:
                raise RetrievalError(
                    f"{folder} is an index of the corpus {manifest.corpus}, and {directory} of {documents.digest}; "
                    "build the index again"
                )
            retrievers.append(engine.open(folder, fitting_documents(manifest, engine, folder)))
        return Hybrid(retrievers, self.fusion, len(documents), self.digest(documents.digest))


def _finished(folder: Path, planned: Manifest) -> bool:
    try:
        return read_manifest(folder).is_of(planned)
    except RetrievalError:
        return False


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a disk without links
        shutil.copyfile(source, target)
