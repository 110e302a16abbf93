"""Vector stores: faiss flat (exact), faiss HNSW, and Chroma's embedded client.

A store is written one array of vectors at a time. A search returns rows of vectors and their inner
products.
"""

from __future__ import annotations

import shutil
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from leret.config.retriever import DenseSettings
from leret.core.errors import MissingDependency, RetrievalError, import_optional, reason
from leret.core.files import atomic_file
from leret.core.progress import Progress

_FAISS = "vectors.faiss"
_CHROMA = "chroma"
_FAISS_PACKAGE = "faiss", "faiss-cpu", "dense"
_NAME = "documents"

Neighbors = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Each query's nearest rows (-1 if fewer than k) and their inner products, both (n_queries, k)."""

Parts = Iterable[NDArray[np.float32]]
"""All vectors in row order, in parts of shape (n, n_dimensions)."""


class FaissStore:
    """Memory-mapped faiss index."""

    name, package = _FAISS, "faiss-cpu"  # the file `name` exists only when the store is complete

    @staticmethod
    def write(parts: Parts, directory: Path, settings: DenseSettings, progress: Progress) -> None:
        """Write a store. Use a single thread, so that the HNSW graph is reproducible."""
        faiss = import_optional(*_FAISS_PACKAGE)
        index: Any = None
        n_threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)
        try:
            for part in parts:
                if index is None and settings.store == "flat":
                    index = faiss.IndexFlatIP(part.shape[1])
                elif index is None:
                    index = faiss.IndexHNSWFlat(
                        part.shape[1], settings.hnsw_m, faiss.METRIC_INNER_PRODUCT
                    )
                    index.hnsw.efConstruction = settings.ef_construction
                index.add(np.ascontiguousarray(part, np.float32))
                progress.advance(len(part))
        finally:
            faiss.omp_set_num_threads(n_threads)
        for left in directory.glob(f".{_FAISS}.*"):  # left by a killed build
            left.unlink()
        with atomic_file(directory / _FAISS, "wb") as file:
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))

    def __init__(self, directory: Path, settings: DenseSettings) -> None:
        self._faiss = import_optional(*_FAISS_PACKAGE)
        path = str(directory / _FAISS)
        try:
            self._index: Any = self._faiss.read_index(path, self._faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise RetrievalError(
                f"{directory}: faiss cannot read the index ({error}); build it again"
            ) from error
        self._ef_search = settings.ef_search if hasattr(self._index, "hnsw") else None

    def nearest(self, queries: NDArray[np.float32], k: int) -> Neighbors:
        """Return the rows with the ``k`` highest inner products per query, in any order."""
        options = {}
        if self._ef_search is not None:
            options["params"] = self._faiss.SearchParametersHNSW(efSearch=max(self._ef_search, k))
        scores, rows = self._index.search(queries, k, **options)
        return rows, scores

    def __len__(self) -> int:
        return int(self._index.ntotal)


class ChromaStore:
    """Chroma collection."""

    name, package = _CHROMA, "chromadb"

    @staticmethod
    def write(parts: Parts, directory: Path, settings: DenseSettings, progress: Progress) -> None:
        scratch = directory / f"{_CHROMA}.part"
        if scratch.exists():  # left by a killed build
            shutil.rmtree(scratch)
        client = _chroma(scratch / uuid4().hex)
        space = {
            "space": "ip",
            "max_neighbors": settings.hnsw_m,
            "ef_construction": settings.ef_construction,
            "ef_search": settings.ef_search,
        }
        at_once = client.get_max_batch_size()
        start = 0
        try:
            collection = client.create_collection(
                _NAME, configuration={"hnsw": space}, embedding_function=None
            )
            for part in parts:
                for i in range(0, len(part), at_once):
                    batch = part[i : i + at_once]
                    collection.add(
                        ids=[str(start + j) for j in range(len(batch))], embeddings=batch
                    )
                    start += len(batch)
                    progress.advance(len(batch))
        except Exception as error:  # Chroma's errors have no common base class
            raise RetrievalError(
                f"{directory}: Chroma cannot write ({reason(error)}); "
                "free some space, or choose another directory"
            ) from error
        finally:
            client.close()
        scratch.rename(directory / _CHROMA)

    def __init__(self, directory: Path, settings: DenseSettings) -> None:
        try:
            # check first, because chromadb creates a missing database
            [build] = [
                path
                for path in (directory / _CHROMA).iterdir()
                if (path / "chroma.sqlite3").is_file()
            ]
            client = _chroma(build)
            self._collection = client.get_collection(_NAME, embedding_function=None)
            self._n_vectors = int(self._collection.count())
        except MissingDependency:
            raise
        except Exception as error:
            raise RetrievalError(
                f"{directory}: Chroma cannot open it ({reason(error)}); build it again"
            ) from error
        weakref.finalize(
            self, client.close
        ).atexit = False  # not needed at exit: the process ends anyway
        self._lock = threading.Lock()

    def nearest(self, queries: NDArray[np.float32], k: int) -> Neighbors:
        rows = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        with self._lock:
            answer = self._collection.query(
                query_embeddings=queries, n_results=k, include=["distances"]
            )
        for i, (ids, distances) in enumerate(zip(answer["ids"], answer["distances"], strict=True)):
            rows[i, : len(ids)] = [int(name) for name in ids]
            scores[i, : len(ids)] = 1 - np.asarray(
                distances, np.float32
            )  # Chroma's distance is 1 - inner product
        return rows, scores

    def __len__(self) -> int:
        return self._n_vectors


def _chroma(folder: Path) -> Any:
    chromadb = import_optional("chromadb", "chromadb", "chroma")
    return chromadb.PersistentClient(
        str(folder), settings=chromadb.Settings(anonymized_telemetry=False)
    )


VectorStore = FaissStore | ChromaStore

STORES: dict[str, type[VectorStore]] = {
    "flat": FaissStore,
    "hnsw": FaissStore,
    "chroma": ChromaStore,
}
"""Store classes by `retriever.store`."""
