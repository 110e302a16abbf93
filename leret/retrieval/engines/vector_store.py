"""Where vectors are kept and searched: faiss flat (exact), faiss HNSW, or Chroma's embedded client.

A store is written from parts, and opened from its directory; a search gives places and inner products.
"""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from leret.core.errors import MissingDependency, RetrievalError

FILE = "vectors.faiss"
"""The index; it is there when it is whole."""

Found = tuple[NDArray[np.int64], NDArray[np.float32]]
"""(n_queries, k) places, -1 where there are no more; and their inner products."""


class VectorStore(Protocol):
    """Vectors by place."""

    def nearest(self, queries: NDArray[np.float32], k: int) -> Found:
        """The vectors of the highest inner products, in no promised order.

        Args:
            queries: (n_queries, n_dimensions).
            k: vectors a query, at most as many as there are.
        """
        ...

    def __len__(self) -> int:
        """How many vectors there are."""
        ...


def write_faiss(
    parts: Iterable[NDArray[np.float32]], directory: Path, *, hnsw: tuple[int, int] | None, told: Callable[[int], None]
) -> None:
    """Write a faiss index.

    Args:
        parts: (n, n_dimensions) each, in the order of the places.
        directory: exists.
        hnsw: links a vector and candidates while it is built; None keeps the vectors alone, and searches exactly.
            Built by one thread, so that the same vectors give the same graph.
        told: called with the number of vectors of every part.

    Raises:
        MissingDependency: faiss is not installed.
        OSError: the directory cannot be written.
    """
    faiss = _faiss()
    index: Any = None
    for part in parts:
        if index is None:
            n_dimensions = part.shape[1]
            if hnsw is None:
                index = faiss.IndexFlatIP(n_dimensions)
            else:
                index = faiss.IndexHNSWFlat(n_dimensions, hnsw[0], faiss.METRIC_INNER_PRODUCT)
                index.hnsw.efConstruction = hnsw[1]
        with _one_thread(faiss):
            index.add(np.ascontiguousarray(part, np.float32))
        told(len(part))
    scratch = directory / f"{FILE}.part"
    try:
        faiss.write_index(index, str(scratch))
    except RuntimeError as error:
        raise OSError(None, f"faiss: {str(error).splitlines()[-1]}") from error
    if os.path.getsize(scratch) < index.ntotal * index.d * 4:
        raise OSError(None, "faiss wrote a part of the index alone; is the disk full?")
    with open(scratch, "rb") as file:
        os.fsync(file.fileno())
    os.replace(scratch, directory / FILE)


def open_faiss(directory: Path, ef_search: int) -> VectorStore:
    """A faiss index, mapped into memory.

    Args:
        directory: that `write_faiss` wrote to.
        ef_search: candidates of an HNSW search; k at least are taken.

    Raises:
        RetrievalError: faiss cannot read it.
        MissingDependency: faiss is not installed.
    """
    faiss = _faiss()
    path = str(directory / FILE)
    try:
        index = faiss.read_index(path, faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise RetrievalError(f"{directory}: faiss cannot read the index ({error}); build it again") from error
    return _Faiss(faiss, index, ef_search)


class _Faiss:
    def __init__(self, faiss: Any, index: Any, ef_search: int) -> None:
        self._faiss = faiss
        self._index = index
        self._graph = hasattr(index, "hnsw")
        self._ef_search = ef_search

    def nearest(self, queries: NDArray[np.float32], k: int) -> Found:
        options = {}
        if self._graph:
            options["params"] = self._faiss.SearchParametersHNSW(efSearch=max(self._ef_search, k))
        scores, places = self._index.search(queries, k, **options)
        return places, scores

    def __len__(self) -> int:
        return int(self._index.ntotal)


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingDependency("faiss-cpu", "dense") from error
    return faiss


pass


FOLDER = "chroma"
"""Where the vectors are; it is there when all of them are."""
_NAME = "documents"
_DATABASE = "chroma.sqlite3"


def write_chroma(
    parts: Iterable[NDArray[np.float32]],
    directory: Path,
    graph: tuple[int, int],
    ef_search: int,
    told: Callable[[int], None],
) -> None:
    """Write a collection of Chroma.

    Args:
        parts: (n, n_dimensions) each, in the order of the places.
        directory: exists.
        graph: links a vector, and candidates while it is built.
        ef_search: candidates of a search.
        told: called with the number of vectors of every batch.

    Raises:
        MissingDependency: chromadb is not installed.
        RetrievalError: Chroma cannot write it.
        OSError: the directory cannot be written.
    """
    scratch = directory / f"{FOLDER}.part"
    if scratch.exists():  # of a build that was stopped
        shutil.rmtree(scratch)
    client = _client(scratch / uuid4().hex)
    space = {"space": "ip", "max_neighbors": graph[0], "ef_construction": graph[1], "ef_search": ef_search}
    at_once = client.get_max_batch_size()
    start = 0
    try:
        collection = client.create_collection(_NAME, configuration={"hnsw": space}, embedding_function=None)
        for part in parts:
            for i in range(0, len(part), at_once):
                batch = part[i : i + at_once]
                collection.add(ids=[str(start + j) for j in range(len(batch))], embeddings=batch)
                start += len(batch)
                told(len(batch))
    except Exception as error:  # Chroma's errors have no common class
        raise RetrievalError(
            f"{directory}: Chroma cannot write the vectors ({type(error).__name__}: {error}); free some space, "
            "or name another directory"
        ) from error
    finally:
        client.close()
    scratch.rename(directory / FOLDER)


def open_chroma(directory: Path) -> VectorStore:
    """A collection of Chroma.

    Args:
        directory: that `write_chroma` wrote to.

    Raises:
        RetrievalError: Chroma cannot open it.
        MissingDependency: chromadb is not installed.
    """
    try:
        return _Chroma(_client(_named(directory / FOLDER)))
    except MissingDependency:
        raise
    except Exception as error:
        raise RetrievalError(
            f"{directory}: Chroma cannot open the vectors ({type(error).__name__}: {error}); build the index again"
        ) from error


class _Chroma:
    def __init__(self, client: Any) -> None:
        weakref.finalize(self, client.close).atexit = False  # at exit the system takes everything back
        self._collection = client.get_collection(_NAME, embedding_function=None)
        self._n_vectors = int(self._collection.count())
        self._lock = threading.Lock()

    def nearest(self, queries: NDArray[np.float32], k: int) -> Found:
        places = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        with self._lock:
            found = self._collection.query(query_embeddings=queries, n_results=k, include=["distances"])
        for row, (ids, distances) in enumerate(zip(found["ids"], found["distances"], strict=True)):
            places[row, : len(ids)] = [int(name) for name in ids]
            scores[row, : len(ids)] = 1 - np.asarray(distances, np.float32)  # Chroma's distance is 1 - inner product
        return places, scores

    def __len__(self) -> int:
        return self._n_vectors


def _named(folder: Path) -> Path:
    """The folder of a build; chromadb would make a missing one."""
    found = [path for path in folder.iterdir() if (path / _DATABASE).is_file()]
    if len(found) != 1:
        raise FileNotFoundError(f"{len(found)} folders with {_DATABASE} in {folder.name}, and one was written")
    return found[0]


def _client(folder: Path) -> Any:
    try:
        import chromadb
    except ImportError as error:
        raise MissingDependency("chromadb", "chroma") from error
    return chromadb.PersistentClient(str(folder), settings=chromadb.Settings(anonymized_telemetry=False))
