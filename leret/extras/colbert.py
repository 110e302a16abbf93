"""Late interaction: a vector per token, exact MaxSim over candidates of a BM25 or dense search.

MaxSim: each query token contributes its maximum inner product with any token of the document; the
score is the sum (Khattab and Zaharia, SIGIR 2020). Files of an index, in addition to the
documents::

    vectors.bin   (n_tokens, n_dimensions) float16 vectors of all documents, memory-mapped
    lengths.bin   (n_documents,) int32 number of tokens per document
    bm25/         index that finds the candidates, or dense/; missing if all documents are scored
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PositiveInt, ValidationInfo, field_validator

from leret.config.base import Free
from leret.config.retriever import (
    BM25Settings,
    DenseSettings,
    EngineSettings,
    ModelPath,
    without_shared_keys,
)
from leret.core.bundled import find_model, model_digest, require_model
from leret.core.errors import RetrievalError, reason
from leret.core.progress import Progress
from leret.core.types import Document, Passage, Ranking
from leret.policies.checkpoints import read_model_json
from leret.retrieval.base import (
    CallableRetriever,
    Documents,
    Retriever,
    clip_k,
    search_valid,
    to_valid_utf8,
)
from leret.retrieval.engines.dense import MODEL_FAULTS, open_model
from leret.retrieval.index.documents import DocumentTable
from leret.retrieval.index.manifest import IndexEngine, Manifest
from leret.retrieval.load import ENGINES, EngineKind, index_engine

if TYPE_CHECKING:
    from leret.retrieval.engines.bm25 import BM25Index
    from leret.retrieval.engines.dense import DenseIndex

_VECTORS = "vectors.bin"
_LENGTHS = "lengths.bin"
_PLACE = "engine."  # prefix of the candidate engine's keys in the manifest
_BLOCK = 1024  # documents scored at once
_DIGITS = 4  # decimal places of a score; further digits depend on the other queries in the batch


class ColbertSettings(EngineSettings):
    """A multi-vector model such as ColBERT, with the token vectors of all documents."""

    kind: Literal["colbert"] = "colbert"
    checkpoint: ModelPath = Field(min_length=1, description="ColBERT directory or name on the hub")
    candidates: Annotated[
        PositiveInt | None, BeforeValidator(lambda value: None if value == "all" else value)
    ] = Field(
        200,
        description="number of results of `engine` to score, at least k; all or null: score all documents",
    )
    engine: BM25Settings | DenseSettings = Field(
        BM25Settings(), discriminator="kind", description="engine that finds the candidates"
    )
    separator: str = Field(" | ", description="separator between a document's title and text")
    doc_maxlen: PositiveInt | None = Field(
        None, description="tokens per document; None: the checkpoint's value"
    )
    query_maxlen: PositiveInt | None = Field(
        None, description="tokens per query; None: the checkpoint's value"
    )
    batch_size: Annotated[PositiveInt, Free()] = Field(64, description="texts per batch")
    device: Annotated[str, Free()] = "auto"

    @field_validator("engine")
    @classmethod
    def _finds_candidates(
        cls, value: BM25Settings | DenseSettings, info: ValidationInfo
    ) -> BM25Settings | DenseSettings:
        if info.data.get("candidates", 0) is None and value != BM25Settings():
            raise ValueError(
                "candidates: all scores every document without an engine; remove engine or candidates"
            )
        if value.index is not None:
            raise ValueError(
                "the engine's files are part of the ColBERT index; remove engine.index"
            )
        return without_shared_keys(value, "the engine of kind colbert")


class ColBERT(CallableRetriever):
    """Search by late interaction. Thread-safe.

    A query with no letters or digits, or without candidates, gets an empty ranking. Ties keep
    corpus order.
    """

    def __init__(
        self,
        documents: DocumentTable,
        directory: Path,
        encoder: MultiVectorModel,
        engine: ColbertIndex,
    ) -> None:
        self.digest = engine.digest(documents.digest)
        self._documents = documents
        self._encoder = encoder
        self._n_candidates = engine.settings.candidates
        self._starts, self._vectors = _read(directory, len(documents), encoder.n_dimensions)
        self._first: Retriever | None = None
        if engine.first is not None:
            self._first = engine.first.open(directory / engine.first.kind, _RowTable(documents))

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        k = clip_k(k, len(self._documents))
        return search_valid(queries, lambda asked: self._search(asked, k))

    def _search(self, queries: list[str], k: int) -> list[Ranking]:
        candidates = [np.arange(len(self._documents))] * len(queries)
        if self._first is not None:
            rankings = self._first.search(queries, max(k, self._n_candidates or k))
            candidates = [_rows(ranking) for ranking in rankings]
        encoded = self._encoder.queries(queries)
        pairs = zip(encoded, candidates, strict=True)
        return [self._ranking(vectors, np.sort(rows), k) for vectors, rows in pairs]

    def _ranking(self, query: NDArray[np.float32], rows: NDArray[np.int64], k: int) -> Ranking:
        parts: list[NDArray[Any]] = [np.zeros(0)]
        for start in range(0, len(rows), _BLOCK):
            parts.append(self._max_sim(query, rows[start : start + _BLOCK]))
        scores = np.concatenate(parts).round(_DIGITS)
        best = np.argsort(-scores, kind="stable")[:k]
        return self._documents.passages(rows[best].tolist(), scores[best].tolist())

    def _max_sim(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the query's score for each document in ``rows``.

        ``query`` is (n_query_tokens, n_dimensions).
        """
        starts = self._starts[rows]
        ends = self._starts[rows + 1]
        spans = zip(starts, ends, strict=True)
        tokens = np.concatenate([self._vectors[start:end] for start, end in spans])
        similarity = tokens.astype(np.float32) @ query.T
        firsts = np.concatenate([[0], np.cumsum(ends - starts)[:-1]])
        scores: NDArray[np.float32] = np.maximum.reduceat(similarity, firsts, axis=0).sum(axis=1)
        return scores


@dataclass(frozen=True)
class ColbertIndex(IndexEngine):
    """Builds and opens ColBERT indexes.

    `ColbertIndex.of` looks up the checkpoint named in the settings.
    """

    settings: ColbertSettings
    checkpoint: Path  # directory of the model
    content: str  # digest of the model
    first: BM25Index | DenseIndex | None  # finds the candidates; None: all documents are scored
    resumable: ClassVar[bool] = True

    @classmethod
    def of(cls, settings: ColbertSettings) -> Self:
        checkpoint = find_model(settings.checkpoint, "retriever.checkpoint")
        content = model_digest(checkpoint)
        first: Any = None
        if settings.candidates is not None:
            first = index_engine(settings.engine)
        return cls(settings, checkpoint, content, first)

    @classmethod
    def from_manifest(cls, manifest: Manifest, directory: Path) -> Self:
        values = dict(manifest.settings)
        checkpoint = Path(manifest.places["checkpoint"])
        content = values.pop("checkpoint")
        engine = values.pop("engine", None)
        require_model(checkpoint, content, directory)
        first: Any = index_engine(BM25Settings())
        if engine is not None:
            paths = {}
            for key, path in manifest.places.items():
                if key.startswith(_PLACE):
                    paths[key.removeprefix(_PLACE)] = path
            keys = {key: value for key, value in engine.items() if key != "kind"}
            part = manifest.model_copy(update={"settings": keys, "places": paths})
            first = ENGINES[engine["kind"]].load().from_manifest(part, directory)
        settings = ColbertSettings(checkpoint=str(checkpoint), engine=first.settings, **values)
        return cls(settings, checkpoint, content, None if settings.candidates is None else first)

    @property
    def packages(self) -> tuple[str, ...]:
        return ("sentence-transformers", *(self.first.packages if self.first else ()))

    def ranking_keys(self) -> dict[str, Any]:
        keys = {"checkpoint": self.content, **self.settings.ranking_keys()}
        del keys["engine"]
        # an index without the key has BM25
        if self.first is not None and self.settings.engine != BM25Settings():
            keys["engine"] = {"kind": self.first.kind, **self.first.ranking_keys()}
        return keys

    def external_paths(self) -> dict[str, str]:
        paths = {"checkpoint": str(self.checkpoint)}
        if self.first:
            for key, path in self.first.external_paths().items():
                paths[f"{_PLACE}{key}"] = path
        return paths

    def write(self, corpus: Documents, directory: Path, progress: Progress) -> None:
        """Encode the documents. Continue where an interrupted build stopped."""
        if self.first is not None:
            (directory / self.first.kind).mkdir(exist_ok=True)
            self.first.write(corpus, directory / self.first.kind, progress)
        encoder = MultiVectorModel(self.checkpoint, self.settings)
        ids = list(corpus)
        # several batches, because the encoder sorts texts by length
        at_once = 8 * self.settings.batch_size
        with (
            open(directory / _LENGTHS, "a+b") as lengths,
            open(directory / _VECTORS, "ab") as vectors,
        ):
            lengths.seek(0)
            encoded = np.frombuffer(lengths.read()[: lengths.tell() // 4 * 4], np.int32)
            lengths.truncate(encoded.nbytes)
            # written before lengths
            vectors.truncate(2 * encoder.n_dimensions * int(encoded.sum()))
            progress.start("encode documents", len(ids))
            progress.advance(len(encoded))
            for start in range(len(encoded), len(ids), at_once):
                texts = [self._text(corpus[doc_id]) for doc_id in ids[start : start + at_once]]
                tokens = encoder.documents(texts)
                vectors.write(np.concatenate(tokens).astype(np.float16).tobytes())
                vectors.flush()
                n_tokens = [len(document) for document in tokens]
                lengths.write(np.array(n_tokens, np.int32).tobytes())
                lengths.flush()
                progress.advance(len(texts))
        progress.finish()

    def open(self, directory: Path, documents: DocumentTable) -> ColBERT:
        return ColBERT(documents, directory, MultiVectorModel(self.checkpoint, self.settings), self)

    def _text(self, document: Document) -> str:
        title = f"{document.title}{self.settings.separator}" if document.title else ""
        return to_valid_utf8(f"{title}{document.text}")


class MultiVectorModel:
    """Multi-vector model of sentence-transformers.

    Thread-safe; encodes for one thread at a time.
    """

    def __init__(self, checkpoint: Path, settings: ColbertSettings) -> None:
        # sentence-transformers would add an untrained projection
        if not is_multi_vector(checkpoint):
            raise RetrievalError(
                f"{checkpoint} is not a ColBERT or other multi-vector model; choose another model"
            )
        self._model = open_model("MultiVectorEncoder", checkpoint, settings.device, "colbert")
        self._batch_size = settings.batch_size
        # a tokenizer stores its truncation length, so it is not thread-safe
        self._lock = threading.Lock()
        transformer = self._model[0]
        try:
            if settings.query_maxlen is not None:
                expansion = transformer.query_expansion
                transformer.query_length = settings.query_maxlen
                transformer.query_expansion = expansion and {
                    **expansion,
                    "length": settings.query_maxlen,
                }
            if settings.doc_maxlen is not None:
                transformer.document_length = settings.doc_maxlen
            longest = "a " * max(settings.doc_maxlen or 1, settings.query_maxlen or 1)
            self.queries([longest])
            self.n_dimensions = self.documents([longest])[0].shape[1]
        except MODEL_FAULTS as error:
            raise RetrievalError(
                f"{checkpoint} cannot encode texts of the maximum length ({reason(error)}); reduce "
                "retriever.doc_maxlen or retriever.query_maxlen"
            ) from error

    def queries(self, texts: list[str]) -> list[NDArray[np.float32]]:
        """Return one (n_tokens, n_dimensions) array per query."""
        return self._encode(self._model.encode_query, texts)

    def documents(self, texts: list[str]) -> list[NDArray[np.float32]]:
        """Return one (n_tokens, n_dimensions) array per document."""
        return self._encode(self._model.encode_document, texts)

    def _encode(self, encode: Any, texts: list[str]) -> list[NDArray[np.float32]]:
        with self._lock:
            vectors = encode(
                texts, batch_size=self._batch_size, convert_to_numpy=True, show_progress_bar=False
            )
        return [np.asarray(array, np.float32) for array in vectors]


class _RowTable(DocumentTable):
    """Documents for the candidate search: a document has its row as id, and no text."""

    def __init__(self, documents: DocumentTable) -> None:
        self.digest = documents.digest
        self._n_documents = len(documents)

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> Ranking:
        pairs = zip(rows, scores, strict=True)
        return tuple([Passage(str(row), "", "", score) for row, score in pairs])


def _rows(ranking: Ranking) -> NDArray[np.int64]:
    """Return the rows in a ranking of `_RowTable`."""
    return np.array([int(passage.doc_id) for passage in ranking], np.int64)


def _read(
    directory: Path, n_documents: int, n_dimensions: int
) -> tuple[NDArray[np.int64], NDArray[np.float16]]:
    """Return each document's start in the vectors, and the vectors.

    Their shapes are (n_documents + 1,) and (n_tokens, n_dimensions).
    """
    try:
        lengths = np.fromfile(directory / _LENGTHS, np.int32)
        vectors = np.memmap(directory / _VECTORS, np.float16, "r").reshape(-1, n_dimensions)
    except (OSError, ValueError) as error:
        raise RetrievalError(
            f"{directory}: cannot read the vectors ({error}); build the index again"
        ) from error
    if len(lengths) != n_documents or lengths.min(initial=1) < 1 or lengths.sum() != len(vectors):
        raise RetrievalError(
            f"{directory}: vectors do not match the {n_documents} documents; build the index again"
        )
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), vectors


def is_multi_vector(directory: Path) -> bool:
    """Return whether a directory is a ColBERT checkpoint or a similar model."""
    kinds = set()
    for path in directory.glob("config*.json"):
        config = read_model_json(path)
        kinds |= {config.get("model_type"), *(config.get("architectures") or ())}
    return bool(kinds & {"HF_ColBERT", "ColBERT", "MultiVectorEncoder"})


COLBERT = EngineKind(ColbertSettings, ColbertIndex, "index")
