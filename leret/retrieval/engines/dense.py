"""Finds documents by the similarity of embeddings: one vector a query, one a document."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from leret.config.retriever import DenseSettings
from leret.core.errors import RetrievalError
from leret.core.hub import find_model, model_digest, require_model
from leret.core.progress import Progress
from leret.core.types import Document, Ranking, digest
from leret.retrieval.base import Documents, answered, checked
from leret.retrieval.engines.encoder import Encoder
from leret.retrieval.engines.vector_store import FILE as FAISS
from leret.retrieval.engines.vector_store import FOLDER as CHROMA
from leret.retrieval.engines.vector_store import VectorStore, open_chroma, open_faiss, write_chroma, write_faiss
from leret.retrieval.index.documents import Passages, Placed, StoredDocuments
from leret.retrieval.index.manifest import Manifest

_SHARD = 2048
"""Documents encoded between two files: what a killed build loses at most."""
_DIGITS = 6
"""Decimals of a score: the last bits depend on what stands beside a query in its batch."""


@dataclass(frozen=True)
class VectorSettings:
    """All that decides a dense index; see `leret.config.retriever.DenseSettings`."""

    query_prefix: str = ""
    document_prefix: str = ""
    separator: str = ". "
    normalize: bool = True
    store: str = "flat"
    hnsw_m: int = 32
    ef_construction: int = 200
    ef_search: int = 128
    max_length: int | None = None

    @classmethod
    def of(cls, values: DenseSettings) -> VectorSettings:
        """From a recipe."""
        return cls(**{field.name: getattr(values, field.name) for field in fields(cls)})


class Dense:
    """Finds documents by their vectors; safe for many threads.

    A query without a letter or a digit has an empty ranking. Equal scores stand in the order of the corpus; which of
    them are left out where a ranking is cut is the store's choice.

    Args:
        documents: where passages take their title and text from.
        store: one vector a document.
        encoder: of queries.
        query_prefix: put before each of them.
        digest: of the retriever.
    """

    def __init__(self, documents: Placed, store: VectorStore, encoder: Encoder, query_prefix: str, digest: str) -> None:
        self._passages = Passages(documents)
        self._store = store
        self._encoder = encoder
        self._prefix = query_prefix
        self.digest = digest

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query.

        Args:
            queries: any strings.
            k: documents a query, at least 1; may be more than there are.

        Returns:
            One ranking a query, in the order of the queries; inner products, not increasing.

        Raises:
            RetrievalError: ``k`` is less than 1.
        """
        k = checked(k, len(self._store))
        return answered(queries, lambda said: self._answers(said, k))

    def _answers(self, queries: list[str], k: int) -> list[Ranking]:
        vectors = self._encoder.encode([self._prefix + query for query in queries])
        places, scores = self._store.nearest(vectors, k)
        scores = np.round(scores, _DIGITS)
        order = np.lexsort((places, -scores), axis=-1)
        rankings = []
        for best, place, score in zip(order, places, scores, strict=True):
            found = best[place[best] >= 0]
            rankings.append(self._passages.ranking(place[found].tolist(), score[found].tolist()))
        return rankings


@dataclass(frozen=True)
class DenseEngine:
    """Builds and opens dense indexes.

    Attributes:
        vectors: all that decides the index, beside the model.
        model: its directory.
        content: digest of the model.
        batch_size: texts encoded at once.
        device: as torch names it, or auto.
    """

    vectors: VectorSettings
    model: Path
    content: str
    batch_size: int = 64
    device: str = "auto"
    kind: ClassVar[str] = "dense"
    resumable: ClassVar[bool] = True

    @classmethod
    def of(cls, settings: DenseSettings) -> DenseEngine:
        """From a recipe.

        Raises:
            RetrievalError: there is no such model.
        """
        model = find_model(settings.model or "", "retriever.dense.model")
        return cls(VectorSettings.of(settings), model, model_digest(model), settings.batch_size, settings.device)

    @classmethod
    def again(cls, manifest: Manifest, directory: Path) -> DenseEngine:
        """The engine that built an index.

        Raises:
            RetrievalError: its model is gone or is another one.
        """
        values = dict(manifest.settings)
        content, model = values.pop("model"), Path(manifest.places["model"])
        require_model(model, content, directory)
        return cls(VectorSettings(**values), model, content)

    @property
    def packages(self) -> tuple[str, ...]:
        """Whose versions matter to an index."""
        return ("sentence-transformers", "chromadb" if self.vectors.store == "chroma" else "faiss-cpu")

    def settings(self) -> dict[str, Any]:
        """All that decides the rankings."""
        return {"model": self.content, **asdict(self.vectors)}

    def places(self) -> dict[str, str]:
        """Where the model is."""
        return {"model": str(self.model)}

    def digest(self, corpus: str) -> str:
        """Of the retriever."""
        return digest("dense", self.settings(), corpus)

    def write(self, corpus: Documents, directory: Path, told: Progress) -> None:
        """Encode the documents, a file of vectors after the other, and index the vectors.

        Raises:
            RetrievalError: the corpus is empty, or the model cannot be opened.
            MissingDependency: a package is not installed.
        """
        if not len(corpus):
            raise RetrievalError("the corpus has no document to index")
        folder = directory / "shards"
        if not (directory / self._file()).exists():
            folder.mkdir(exist_ok=True)
            self._index(self._encoded(corpus, folder, told), directory, len(corpus), told)
        if folder.exists():
            shutil.rmtree(folder)

    def open(self, directory: Path, documents: StoredDocuments) -> Dense:
        """A saved index.

        Raises:
            RetrievalError: it cannot be read, or does not fit its documents.
            MissingDependency: a package is not installed.
        """
        settings = self.vectors
        chroma = settings.store == "chroma"
        store = open_chroma(directory) if chroma else open_faiss(directory, settings.ef_search)
        if len(store) != len(documents):
            raise RetrievalError(
                f"{directory}: {len(store)} vectors, and {len(documents)} documents; build the index again"
            )
        return Dense(documents, store, self._encoder(), settings.query_prefix, self.digest(documents.digest))

    def _file(self) -> str:
        """What a finished index of the vectors is called."""
        return CHROMA if self.vectors.store == "chroma" else FAISS

    def _index(self, shards: list[Path], directory: Path, n_documents: int, told: Progress) -> None:
        told.start("index vectors", n_documents)
        parts = (np.load(path, allow_pickle=False) for path in shards)
        if self.vectors.store == "chroma":
            write_chroma(parts, directory, self._graph(), self.vectors.ef_search, told.advance)
        else:
            graph = self._graph() if self.vectors.store == "hnsw" else None
            write_faiss(parts, directory, hnsw=graph, told=told.advance)
        told.finish()

    def _graph(self) -> tuple[int, int]:
        return self.vectors.hnsw_m, self.vectors.ef_construction

    def _encoder(self) -> Encoder:
        settings = self.vectors
        return Encoder(
            self.model,
            normalize=settings.normalize,
            max_length=settings.max_length,
            batch_size=self.batch_size,
            device=self.device,
        )

    def _encoded(self, corpus: Documents, folder: Path, told: Progress) -> list[Path]:
        """Files of vectors, `_SHARD` documents each; those that an earlier build finished are left as they are."""
        ids = list(corpus)
        paths = [folder / f"{start:09}.npy" for start in range(0, len(ids), _SHARD)]
        missing = [path for path in paths if not path.exists()]
        if not missing:
            return paths
        told.start("encode documents", len(ids))
        told.advance(min(len(ids), _SHARD * (len(paths) - len(missing))))
        encoder, at_once = self._encoder(), 8 * self.batch_size  # sorted by length inside, so not one batch at a time
        for i, path in enumerate(paths):
            if path not in missing:
                continue
            rows = []
            part = ids[i * _SHARD : (i + 1) * _SHARD]
            for start in range(0, len(part), at_once):
                texts = [self._text(corpus[doc_id]) for doc_id in part[start : start + at_once]]
                rows.append(encoder.encode(texts))
                told.advance(len(texts))
            _save(np.concatenate(rows), path)
        told.finish()
        return paths

    def _text(self, document: Document) -> str:
        title = f"{document.title}{self.vectors.separator}" if document.title else ""
        return f"{self.vectors.document_prefix}{title}{document.text}"


def _save(vectors: NDArray[np.float32], path: Path) -> None:
    scratch = path.with_suffix(".part")
    with open(scratch, "wb") as file:
        np.save(file, vectors)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
