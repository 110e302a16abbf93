"""Vectors of a dense index in Chroma's embedded client (``store: chroma``)."""

from __future__ import annotations

import shutil
import threading
import weakref
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from leret.config.retriever import DenseSettings
from leret.core.errors import MissingDependency, RetrievalError, import_optional, reason
from leret.core.progress import Progress
from leret.retrieval.engines.vector_store import Neighbors, Parts, VectorStore

_FOLDER = "chroma"  # Chroma changes its files when it opens them, so manifests do not list them
_NAME = "documents"


class ChromaStore(VectorStore):
    """Chroma collection."""

    name = _FOLDER
    package = "chromadb"

    @staticmethod
    def write(parts: Parts, directory: Path, settings: DenseSettings, progress: Progress) -> None:
        scratch = directory / f"{_FOLDER}.part"
        if scratch.exists():  # left by a killed build
            shutil.rmtree(scratch)
        client = _client(scratch / uuid4().hex)
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
        scratch.rename(directory / _FOLDER)

    def __init__(self, directory: Path, settings: DenseSettings) -> None:
        try:
            # check first, because chromadb creates a missing database
            [build] = [
                path
                for path in (directory / _FOLDER).iterdir()
                if (path / "chroma.sqlite3").is_file()
            ]
            client = _client(build)
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
            # Chroma's distance is 1 - inner product
            scores[i, : len(ids)] = 1 - np.asarray(distances, np.float32)
        return rows, scores

    def __len__(self) -> int:
        return self._n_vectors


def _client(folder: Path) -> Any:
    chromadb = import_optional("chromadb", "chromadb", "chroma")
    return chromadb.PersistentClient(
        str(folder), settings=chromadb.Settings(anonymized_telemetry=False)
    )
