"""Dense retrieval: one embedding per query and per document, ranked by similarity."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from leret.config.retriever import DenseSettings
from leret.core.bundled import find_model, model_digest, require_model
from leret.core.errors import RetrievalError, import_optional, reason
from leret.core.files import atomic_file
from leret.core.progress import Progress
from leret.core.types import Document, Ranking
from leret.retrieval.base import CallableRetriever, Documents, clip_k, search_valid, to_valid_utf8
from leret.retrieval.engines.vector_store import VectorStore, store_class
from leret.retrieval.index.documents import DocumentTable
from leret.retrieval.index.manifest import IndexEngine, Manifest

_SHARD = 2048  # documents per file during a build; a killed build loses at most one file
MODEL_FAULTS = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    AssertionError,  # torch without CUDA
    UnpicklingError,
)
"""Exceptions raised by sentence-transformers for unusable model files or settings."""

_DIGITS = 6  # decimal places of a score; further digits depend on the other queries in the batch


class Dense(CallableRetriever):
    """Dense search. Thread-safe.

    A query with no letters or digits gets an empty ranking. Ties keep corpus order. If more
    documents tie at rank ``k`` than can be returned, the store chooses. ``query_prefix`` is
    prepended to each query.
    """

    def __init__(
        self,
        documents: DocumentTable,
        store: VectorStore,
        encoder: Encoder,
        query_prefix: str,
        digest: str,
    ) -> None:
        self._passages = documents.passages
        self._store = store
        self._encoder = encoder
        self._prefix = query_prefix
        self.digest = digest

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        k = clip_k(k, len(self._store))
        return search_valid(queries, lambda asked: self._search(asked, k))

    def _search(self, queries: list[str], k: int) -> list[Ranking]:
        vectors = self._encoder.encode([self._prefix + query for query in queries])
        rows, scores = self._store.nearest(vectors, k)
        scores = np.round(scores, _DIGITS)
        order = np.lexsort((rows, -scores), axis=-1)
        rankings = []
        for best, row, score in zip(order, rows, scores, strict=True):
            valid = best[row[best] >= 0]
            rankings.append(self._passages(row[valid].tolist(), score[valid].tolist()))
        return rankings


@dataclass(frozen=True)
class DenseIndex(IndexEngine):
    """Builds and opens dense indexes. `DenseIndex.of` looks up the models named in the settings."""

    settings: DenseSettings
    models: Mapping[str, Path]  # directories of ``model`` and, if set, ``query_model``
    contents: Mapping[str, str]  # digest of each model
    resumable: ClassVar[bool] = True

    @classmethod
    def of(cls, settings: DenseSettings) -> Self:
        names = {"model": settings.model, "query_model": settings.query_model}
        models = {}
        for key, name in names.items():
            if name is not None:
                models[key] = find_model(name, f"retriever.{key}")
        contents = {key: model_digest(model) for key, model in models.items()}
        return cls(settings, models, contents)

    @classmethod
    def from_manifest(cls, manifest: Manifest, directory: Path) -> Self:
        values = dict(manifest.settings)
        models = {key: Path(path) for key, path in manifest.places.items()}
        contents = {key: values.pop(key) for key in models}
        for key, model in models.items():
            require_model(model, contents[key], directory)
        return cls(DenseSettings(**manifest.places, **values), models, contents)

    @property
    def packages(self) -> tuple[str, ...]:
        return ("sentence-transformers", store_class(self.settings).package)

    def ranking_keys(self) -> dict[str, Any]:
        return {**self.contents, **self.settings.ranking_keys()}

    def external_paths(self) -> dict[str, str]:
        return {key: str(model) for key, model in self.models.items()}

    def write(self, corpus: Documents, directory: Path, progress: Progress) -> None:
        folder = directory / "shards"
        store = store_class(self.settings)
        if not (directory / store.name).exists():
            folder.mkdir(exist_ok=True)
            shards = self._encode(corpus, folder, progress)
            progress.start("index vectors", len(corpus))
            vectors = (np.load(path, allow_pickle=False) for path in shards)
            store.write(vectors, directory, self.settings, progress)
            progress.finish()
        if folder.exists():
            shutil.rmtree(folder)

    def open(self, directory: Path, documents: DocumentTable) -> Dense:
        store = store_class(self.settings)(directory, self.settings)
        if len(store) != len(documents):
            raise RetrievalError(
                f"{directory}: {len(store)} vectors for {len(documents)} documents; build it again"
            )
        model = self.models.get("query_model", self.models["model"])
        encoder = Encoder(model, self.settings)
        digest = self.digest(documents.digest)
        return Dense(documents, store, encoder, self.settings.query_prefix, digest)

    def _encode(self, corpus: Documents, folder: Path, progress: Progress) -> list[Path]:
        """Write the missing vector files, `_SHARD` documents each.

        Return the paths of all files.
        """
        ids = list(corpus)
        paths = [folder / f"{start:09}.npy" for start in range(0, len(ids), _SHARD)]
        missing = {i for i, path in enumerate(paths) if not path.exists()}
        progress.start("encode documents", len(ids))
        n_encoded = _SHARD * (len(paths) - len(missing))
        progress.advance(min(len(ids), n_encoded))
        encoder = Encoder(self.models["model"], self.settings)
        # several batches at once, because the encoder sorts texts by length
        at_once = 8 * self.settings.batch_size
        for i in sorted(missing):
            rows = []
            part = ids[i * _SHARD : (i + 1) * _SHARD]
            for start in range(0, len(part), at_once):
                texts = [self._text(corpus[doc_id]) for doc_id in part[start : start + at_once]]
                rows.append(encoder.encode(texts))
                progress.advance(len(texts))
            with atomic_file(paths[i], "wb") as file:
                np.save(file, np.concatenate(rows))
        progress.finish()
        return paths

    def _text(self, document: Document) -> str:
        title = f"{document.title}{self.settings.separator}" if document.title else ""
        return f"{self.settings.document_prefix}{title}{document.text}"


class Encoder:
    """Embedding model of sentence-transformers. Thread-safe; encodes for one thread at a time."""

    def __init__(self, directory: Path, settings: DenseSettings) -> None:
        self._model = open_model("SentenceTransformer", directory, settings.device, "dense")
        if settings.max_length is not None:
            _lengthen(self._model, settings.max_length, directory)
        self._normalize = settings.normalize
        self._batch_size = settings.batch_size
        # a tokenizer stores its truncation length, so it is not thread-safe
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return (n_texts, n_dimensions) float32 embeddings."""
        with self._lock:
            embeddings = self._model.encode(
                [to_valid_utf8(text) for text in texts],
                batch_size=self._batch_size,
                normalize_embeddings=self._normalize,
                show_progress_bar=False,
            )
        return np.ascontiguousarray(embeddings, np.float32)


def open_model(kind: str, directory: Path, device: str, extra: str) -> Any:
    """Open a model with the sentence-transformers class ``kind``.

    ``extra`` is the pip extra that installs it.
    """
    library = import_optional("sentence_transformers", "sentence-transformers", extra)
    from safetensors import SafetensorError

    try:
        # device None: sentence-transformers chooses
        return getattr(library, kind)(
            str(directory), device=None if device == "auto" else device, local_files_only=True
        )
    except (*MODEL_FAULTS, SafetensorError) as error:
        raise RetrievalError(
            f"{directory} cannot be opened as a sentence-transformers model ({reason(error)}); "
            "choose another model, "
            f"or change retriever.device: {device}"
        ) from error


def _lengthen(model: Any, max_length: int, directory: Path) -> None:
    """Set the maximum number of tokens per text.

    Above the model's limit, test that it can encode such a text.
    """
    limit = model.max_seq_length
    model.max_seq_length = max_length
    if limit is not None and max_length <= limit:
        return
    try:
        model.encode(["a " * max_length], show_progress_bar=False)
    except (RuntimeError, IndexError, ValueError) as error:
        raise RetrievalError(
            f"retriever.max_length: {directory} cannot encode {max_length} tokens "
            f"({reason(error)}); "
            f"set at most {limit}"
        ) from error
