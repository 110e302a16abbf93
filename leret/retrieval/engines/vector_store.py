"""Vector stores: faiss flat (exact) and faiss HNSW.

A store is written one array of vectors at a time. A search returns rows of vectors and their inner
products.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from leret.config.retriever import DenseSettings
from leret.core.errors import RetrievalError, import_optional
from leret.core.files import atomic_file
from leret.core.progress import Progress

_FAISS = "vectors.faiss"
_FAISS_PACKAGE = "faiss", "faiss-cpu", "dense"

Neighbors = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Each query's nearest rows (-1 if fewer than k) and their inner products, both (n_queries, k)."""

Parts = Iterable[NDArray[np.float32]]
"""All vectors in row order, in parts of shape (n, n_dimensions)."""


class VectorStore(Protocol):
    """A store in an index directory."""

    # file or folder in the directory, which exists only when the store is complete
    name: ClassVar[str]
    package: ClassVar[str]

    def __init__(self, directory: Path, settings: DenseSettings) -> None: ...

    @staticmethod
    def write(parts: Parts, directory: Path, settings: DenseSettings, progress: Progress) -> None:
        """Write a store."""

    def nearest(self, queries: NDArray[np.float32], k: int) -> Neighbors:
        """Return the rows with the ``k`` highest inner products per query, in any order."""
        ...

    def __len__(self) -> int:
        """Return the number of vectors."""
        ...


class FaissStore(VectorStore):
    """Memory-mapped faiss index."""

    name = _FAISS
    package = "faiss-cpu"

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


def store_class(settings: DenseSettings) -> type[VectorStore]:
    """Return the store class of `retriever.store`."""
    if settings.store not in settings.stores_on_shelf:
        return FaissStore
    store: type[VectorStore] = resolve_name(settings.stores_on_shelf[settings.store])
    return store
