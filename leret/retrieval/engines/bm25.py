"""BM25 over an index of bm25s, mapped into memory; ``bm25s.BM25.load`` can open the directory too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from leret.config.retriever import BM25Settings
from leret.core.errors import RetrievalError
from leret.core.progress import Progress
from leret.core.types import Ranking, digest
from leret.retrieval.base import CallableRetriever, Documents, clip_k
from leret.retrieval.engines.analysis import make_analyzer
from leret.retrieval.index.documents import DocumentTable, InMemoryDocuments, MappedDocuments, make_passages
from leret.retrieval.index.manifest import IndexEngine, Manifest, write_index

_FEW = 64  # results of a batch below which NumPy is slower than Python
_CELLS = 1 << 22  # entries of the result matrix: bounds the memory of a large batch with a large k


@dataclass(frozen=True, slots=True)
class ScoreMatrix:
    """Weights of all words in all documents, by columns."""

    vocabulary: Mapping[str, int]  # words to columns
    data: NDArray[np.float32]  # (n_entries,) weight of a word in a document
    indices: NDArray[np.uint32]  # (n_entries,) row of the document of each weight
    indptr: NDArray[np.int64]  # (n_words + 1,) start of each column


class BM25(CallableRetriever):
    """Search by words. Made by `BM25.build` or `leret.retrieval.load.open_index`; safe for many threads.

    Documents without a word of the query are not returned. Equal scores keep the order of the corpus. ``settings`` are
    those of the build of ``index``.
    """

    only_computes: ClassVar[bool] = True

    def __init__(self, documents: DocumentTable, index: ScoreMatrix, settings: BM25Settings) -> None:
        from leret.retrieval.engines.bm25_topk import top_k

        self.index = index
        self.source: Any = None  # see leret.retrieval.load.retriever_record
        self.n_documents = len(documents)
        self.digest = BM25Index(settings).digest(documents.digest)
        self.words = make_analyzer(settings)
        self.ranking = make_passages(documents)
        self._top_k = top_k

    @classmethod
    def build(cls, corpus: Documents, directory: Path | None = None, **settings: Any) -> BM25:
        """Index a corpus in memory or in a directory; ``settings`` are keys of `BM25Settings`."""
        engine = BM25Index(BM25Settings(**settings))
        if directory is None:
            index = _index(corpus, engine.settings)
            scores = index.scores
            matrix = _matrix(index.vocab_dict, scores["data"], scores["indices"], scores["indptr"])
            bm25 = cls(InMemoryDocuments(corpus), matrix, engine.settings)
            bm25.source = engine, corpus
            return bm25
        write_index(engine, corpus, directory)
        bm25 = engine.open(directory, MappedDocuments(directory, corpus.digest))
        bm25.source = directory
        return bm25

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.source, Path):
            return import_module("leret.retrieval.load").open_index, (self.source.resolve(),)
        engine, corpus = self.source
        return partial(BM25.build, **engine.settings.ranking_keys()), (corpus,)

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        if not 1 <= k <= self.n_documents:
            k = clip_k(k, self.n_documents)
        at_once = max(1, _CELLS // k)
        if len(queries) > at_once:
            parts = (queries[start : start + at_once] for start in range(0, len(queries), at_once))
            return [ranking for part in parts for ranking in self.search(part, k)]
        known, words, ends = self.index.vocabulary, self.words, [0]
        columns: list[int] = []
        for query in queries:
            columns += [known[word] for word in words(query) if word in known]
            ends.append(len(columns))
        documents = np.zeros((len(queries), k), np.int32)
        scores = np.zeros((len(queries), k), np.float32)
        index, starts = self.index, np.array(ends, np.int64)
        self._top_k(
            np.array(columns, np.int32), starts, index.data, index.indices, index.indptr, documents, scores,
            self.n_documents,
        )  # fmt: skip
        if documents.size <= _FEW:  # Python sorts a few numbers in a tenth of NumPy's time
            pairs = [
                sorted((-score, row) for score, row in zip(*pair, strict=True) if score > 0)
                for pair in zip(scores.tolist(), documents.tolist(), strict=True)
            ]
            return [self.ranking([row for _, row in best], [-score for score, _ in best]) for best in pairs]
        order = np.lexsort((documents, -scores), axis=-1)
        lengths = (scores > 0).sum(axis=-1).tolist()
        best = np.take_along_axis(documents, order, axis=-1).tolist()
        high = np.take_along_axis(scores, order, axis=-1).tolist()
        ranking = self.ranking
        return [ranking(rows[:n], values[:n]) for rows, values, n in zip(best, high, lengths, strict=True)]


@dataclass(frozen=True)
class BM25Index(IndexEngine):
    """Builds and opens BM25 indexes."""

    settings: BM25Settings
    kind: ClassVar[str] = "bm25"
    packages = ("bm25s",)

    @classmethod
    def from_manifest(cls, manifest: Manifest, directory: Path) -> Self:
        values = dict(manifest.settings)
        del values["method"]
        return cls(BM25Settings(**values))

    def ranking_keys(self) -> dict[str, Any]:
        return {"method": "lucene", **self.settings.ranking_keys()}

    def digest(self, corpus: str) -> str:
        return digest("bm25s", self.ranking_keys(), corpus)

    def write(self, corpus: Documents, directory: Path, progress: Progress) -> None:
        progress.start("index words", len(corpus))
        _index(corpus, self.settings).save(directory, show_progress=False)
        progress.advance(len(corpus))
        progress.finish()

    def open(self, directory: Path, documents: MappedDocuments) -> BM25:
        return BM25(documents, _read(directory, len(documents)), self.settings)


def _index(corpus: Documents, settings: BM25Settings) -> Any:
    """Return bm25s's index of ``title. text`` of all documents."""
    import bm25s

    words = make_analyzer(settings)
    vocabulary: dict[str, int] = {}
    columns = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in words(f"{document.title}. {document.text}")]
        for document in map(corpus.__getitem__, corpus)
    ]
    if not vocabulary:
        raise RetrievalError(f"none of the {len(corpus)} documents has a word to index; check the corpus")
    engine = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene", backend="numpy")
    engine.index((columns, vocabulary), create_empty_token=False, show_progress=False)
    return engine


def _read(directory: Path, n_documents: int) -> ScoreMatrix:
    """Map an index into memory, after a check of its rows and columns, which the search does not check."""
    try:
        vocabulary = json.loads((directory / "vocab.index.json").read_text(encoding="utf-8"))
        arrays = [
            np.load(directory / f"{name}.csc.index.npy", mmap_mode="r", allow_pickle=False)
            for name in ("data", "indices", "indptr")
        ]
        index = _matrix(vocabulary, *arrays)
        columns = np.fromiter(vocabulary.values(), np.int64, len(vocabulary)).view(np.uint64)
    except (OSError, ValueError, EOFError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RetrievalError(f"{directory}: the index cannot be read ({error}); build it again") from error
    n, starts = len(index.data), index.indptr
    if (
        any(array.ndim != 1 for array in arrays)
        or (len(starts), len(index.indices)) != (len(columns) + 1, n)
        or (starts[0], starts[-1]) != (0, n)
        or (starts[1:] < starts[:-1]).any()
        or columns.max(initial=0) >= len(columns)
    ):
        raise RetrievalError(f"{directory}: the index files do not fit together; build it again")
    highest = int(index.indices.max(initial=0))  # a negative row is a very high one
    if highest >= n_documents:
        raise RetrievalError(f"{directory}: document {highest} of {n_documents}; build the index again")
    return index


def _matrix(vocabulary: Mapping[str, int], data: Any, indices: Any, indptr: Any) -> ScoreMatrix:
    """Return read-only arrays of fixed types, so that the search is compiled for one signature."""
    arrays = []
    for values, dtype in ((data, np.float32), (indices, np.int32), (indptr, np.int64)):
        array = np.ascontiguousarray(values, dtype).view(np.ndarray)
        array.flags.writeable = False
        arrays.append(array)
    return ScoreMatrix(vocabulary, arrays[0], arrays[1].view(np.uint32), arrays[2])
