"""Vectors in Chroma's embedded client, which keeps them in a directory: one of the stores of the dense engine.

Its graph is built by several threads, so two builds of the same vectors may differ in a few of the documents they find.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leret.errors import MissingDependency, RetrievalError
from leret.retrieval.vectors import Found, VectorStore

__all__ = ["open_chroma", "write_chroma"]

_FOLDER = "chroma"
_NAME = "documents"


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
    """
    client = _client(directory / _FOLDER)
    with suppress(Exception):  # of a build that was stopped
        client.delete_collection(_NAME)
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


def open_chroma(directory: Path) -> VectorStore:
    """A collection of Chroma.

    Args:
        directory: that `write_chroma` wrote to.

    Raises:
        RetrievalError: Chroma cannot open it.
        MissingDependency: chromadb is not installed.
    """
    try:
        collection = _client(directory / _FOLDER).get_collection(_NAME, embedding_function=None)
        return _Chroma(collection, collection.count())
    except MissingDependency:
        raise
    except Exception as error:
        raise RetrievalError(
            f"{directory}: Chroma cannot open the vectors ({type(error).__name__}: {error}); build the index again"
        ) from error


class _Chroma:
    def __init__(self, collection: Any, n_vectors: int) -> None:
        self._collection = collection
        self._n_vectors = n_vectors
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


def _client(folder: Path) -> Any:
    try:
        import chromadb
    except ImportError as error:
        raise MissingDependency("chromadb", "chroma") from error
    return chromadb.PersistentClient(str(folder), settings=chromadb.Settings(anonymized_telemetry=False))
