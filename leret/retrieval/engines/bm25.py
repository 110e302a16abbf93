"""BM25 over a memory-mapped bm25s index. ``bm25s.BM25.load`` can open the directory too.

`top_k` replaces the inner loop of bm25s. It breaks ties by document order, which bm25s does not. It
omits documents that contain no query word. It is compiled once per machine, not per process.
"""

from __future__ import annotations

import json
import os
import re
import threading
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import numba
import numpy as np
from numpy.typing import NDArray

from leret.config.retriever import AnalyzerSettings, BM25Settings
from leret.core.errors import RetrievalError, import_optional
from leret.core.progress import Progress
from leret.core.types import Ranking, digest
from leret.retrieval.base import CallableRetriever, Documents, clip_k
from leret.retrieval.index.documents import DocumentTable
from leret.retrieval.index.manifest import IndexEngine, Manifest, write_index

# bm25s starts JAX, which reserves the GPU's memory
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

_WORD = re.compile(r"\b\w\w+\b")
_CELLS = 1 << 22  # results ranked at once, to limit memory


@dataclass(frozen=True, slots=True)
class ScoreMatrix:
    """Weights of words in documents: a sparse matrix with one column per word."""

    vocabulary: Mapping[str, int]  # column per word
    data: NDArray[np.float32]  # (n_entries,) weights
    indices: NDArray[np.uint32]  # (n_entries,) document row of each weight
    indptr: NDArray[np.int64]  # (n_words + 1,) start of each column


class BM25(CallableRetriever):
    """BM25 search. Create with `BM25.build` or `leret.retrieval.load.open_index`. Thread-safe.

    Documents that contain no query word are not returned. Ties keep corpus order. ``settings`` are
    the settings that ``index`` was built with.
    """

    only_computes: ClassVar[bool] = True

    def __init__(
        self, documents: DocumentTable, index: ScoreMatrix, settings: BM25Settings
    ) -> None:
        self.index = index
        self.source: Any = None  # see leret.retrieval.load.retriever_record
        self.n_documents = len(documents)
        self.digest = BM25Index(settings).digest(documents.digest)
        self.words = make_analyzer(settings)
        self.ranking = documents.passages

    @classmethod
    def build(cls, corpus: Documents, directory: Path | None = None, **settings: Any) -> BM25:
        """Build an index, in memory or in a directory.

        ``settings`` are fields of `BM25Settings`.
        """
        engine = BM25Index(BM25Settings(**settings))
        if directory is None:
            index = _index(corpus, engine.settings)
            scores = index.scores
            matrix = _matrix(index.vocab_dict, scores["data"], scores["indices"], scores["indptr"])
            bm25 = cls(DocumentTable.of(corpus), matrix, engine.settings)
            bm25.source = engine, corpus
            return bm25
        write_index(engine, corpus, directory)
        bm25 = engine.open(directory, DocumentTable.open(directory, corpus.digest))
        bm25.source = directory
        return bm25

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.source, Path):
            return import_module("leret.retrieval.load").open_index, (self.source.resolve(),)
        engine, corpus = self.source
        return partial(BM25.build, **engine.settings.ranking_keys()), (corpus,)

    def search(self, queries: Sequence[str | Mapping[str, float]], k: int) -> list[Ranking]:
        """Rank documents for each query: a text, or words with factors for their weights."""
        if not 1 <= k <= self.n_documents:
            k = clip_k(k, self.n_documents)
        at_once = max(1, _CELLS // k)
        rankings: list[Ranking] = []
        for start in range(0, len(queries), at_once):
            documents, scores = self._best(queries[start : start + at_once], k)
            for rows, values in zip(documents.tolist(), scores.tolist(), strict=True):
                pairs = zip(values, rows, strict=True)
                best = sorted((-score, row) for score, row in pairs if score > 0)
                ranking = self.ranking([row for _, row in best], [-score for score, _ in best])
                rankings.append(ranking)
        return rankings

    def _best(
        self, queries: Sequence[str | Mapping[str, float]], k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the best documents and their scores, both (n_queries, k), unordered."""
        index = self.index
        vocabulary = index.vocabulary
        columns: list[int] = []
        factors: list[float] = []
        ends = [0]
        for query in queries:
            words = self.words(query) if isinstance(query, str) else query
            new_columns = [vocabulary[word] for word in words if word in vocabulary]
            columns += new_columns
            factors += [1.0] * len(new_columns) if isinstance(query, str) else query.values()
            ends.append(len(columns))
        size = (len(queries), k)
        documents = np.zeros(size, np.int32)
        scores = np.zeros(size, np.float32)
        top_k(
            np.array(columns, np.int32),
            np.array(factors, np.float32),
            np.array(ends, np.int64),
            index.data,
            index.indices,
            index.indptr,
            documents,
            scores,
            self.n_documents,
        )
        return documents, scores


@dataclass(frozen=True)
class BM25Index(IndexEngine):
    """Builds and opens BM25 indexes."""

    settings: BM25Settings
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

    def open(self, directory: Path, documents: DocumentTable) -> BM25:
        return BM25(documents, _read(directory, len(documents)), self.settings)


def _index(corpus: Documents, settings: BM25Settings) -> Any:
    """Return a bm25s index of all documents, each as ``title. text``."""
    import bm25s

    words = make_analyzer(settings)
    vocabulary: dict[str, int] = {}
    columns = []
    for doc_id in corpus:
        document = corpus[doc_id]
        content = words(f"{document.title}. {document.text}")
        columns.append([vocabulary.setdefault(word, len(vocabulary)) for word in content])
    if not vocabulary:
        raise RetrievalError(
            f"none of the {len(corpus)} documents contains a word to index; check the corpus"
        )
    engine = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene", backend="numpy")
    engine.index((columns, vocabulary), create_empty_token=False, show_progress=False)
    return engine


def _read(directory: Path, n_documents: int) -> ScoreMatrix:
    """Memory-map an index.

    Check its rows and columns once, because `top_k` does not check bounds.
    """
    try:
        vocabulary = json.loads((directory / "vocab.index.json").read_text(encoding="utf-8"))
        arrays = [
            np.load(directory / f"{name}.csc.index.npy", mmap_mode="r", allow_pickle=False)
            for name in ("data", "indices", "indptr")
        ]
        index = _matrix(vocabulary, *arrays)
        columns = np.fromiter(vocabulary.values(), np.int64, len(vocabulary)).view(np.uint64)
    except (
        OSError,
        ValueError,
        EOFError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise RetrievalError(
            f"{directory}: cannot read the index ({error}); build it again"
        ) from error
    n = len(index.data)
    starts = index.indptr
    if (
        any(array.ndim != 1 for array in arrays)
        or len(index.indices) != n
        or len(starts) != len(columns) + 1
        or starts[0] != 0
        or starts[-1] != n
        or (starts[1:] < starts[:-1]).any()
        or columns.max(initial=0) >= len(columns)
    ):
        raise RetrievalError(
            f"{directory}: the sizes of the index files do not match; build the index again"
        )
    highest = int(index.indices.max(initial=0))  # unsigned, so a negative row is a very high number
    if highest >= n_documents:
        raise RetrievalError(
            f"{directory} refers to row {highest} but has {n_documents} documents; build it again"
        )
    return index


def _matrix(vocabulary: Mapping[str, int], data: Any, indices: Any, indptr: Any) -> ScoreMatrix:
    """Convert to read-only arrays of fixed types, so that `top_k` is compiled only once."""
    arrays = []
    for values, dtype in ((data, np.float32), (indices, np.int32), (indptr, np.int64)):
        array = np.ascontiguousarray(values, dtype).view(np.ndarray)
        array.flags.writeable = False
        arrays.append(array)
    return ScoreMatrix(vocabulary, arrays[0], arrays[1].view(np.uint32), arrays[2])


def _compiled(function: Callable[..., Any]) -> Any:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no writable directory for numba's cache
        return numba.njit(nogil=True)(function)


@_compiled
def _worse(score: float, document: int, than_score: float, than_document: int) -> bool:
    """Return whether a result ranks below another. Ties are broken by document order."""
    return score < than_score or (score == than_score and document > than_document)


@_compiled
def _replace_worst(
    scores: NDArray[np.float32], documents: NDArray[np.int32], score: float, document: int
) -> None:
    """Replace the worst result (at the top of the heap), and restore the heap order."""
    n = len(scores)
    hole = 0
    child = 1
    while child < n:
        right = child + 1
        if right < n and _worse(scores[right], documents[right], scores[child], documents[child]):
            child = right
        if not _worse(scores[child], documents[child], score, document):
            break
        scores[hole] = scores[child]
        documents[hole] = documents[child]
        hole = child
        child = 2 * child + 1
    scores[hole] = score
    documents[hole] = document


@_compiled
def top_k(
    words: NDArray[np.int32],
    factors: NDArray[np.float32],
    starts: NDArray[np.int64],
    data: NDArray[np.float32],
    indices: NDArray[np.uint32],
    indptr: NDArray[np.int64],
    best_documents: NDArray[np.int32],
    best_scores: NDArray[np.float32],
    n_documents: int,
) -> None:
    """Write each query's best documents and scores to ``best_*``, unordered.

    Unused cells keep score 0.
    """
    scores = np.zeros(n_documents, np.float32)
    above_0 = np.float32(1e-45)
    for query in range(len(starts) - 1):
        columns = range(starts[query], starts[query + 1])
        for column in columns:
            word = words[column]
            factor = factors[column]
            among = indices[indptr[word] : indptr[word + 1]]
            weights = data[indptr[word] : indptr[word + 1]]
            for i in range(len(among)):
                scores[among[i]] += factor * weights[i]
        # already a heap, because all scores are 0
        heap_scores = best_scores[query]
        heap = best_documents[query]
        lowest = heap_scores[0]
        for column in columns:
            word = words[column]
            among = indices[indptr[word] : indptr[word + 1]]
            for i in range(len(among)):
                document = among[i]
                score = scores[document]
                # so that the document is skipped in the columns of other words
                scores[document] = 0
                # one comparison that is nearly always false is twice as fast as testing
                # `score > 0` first
                if score >= max(lowest, above_0) and _worse(lowest, heap[0], score, document):
                    _replace_worst(heap_scores, heap, score, document)
                    lowest = heap_scores[0]


def make_analyzer(settings: AnalyzerSettings) -> Callable[[str], list[str]]:
    """Return a thread-safe function that splits text into words.

    The words are in lower case, have two or more characters and are no stop words.

    Without ``fold_accents``, the words are the same as from ``bm25s.tokenize``.
    """
    stop = _stopwords(settings.stopwords, settings.fold_accents)
    fold = settings.fold_accents
    stem = _stemmer(settings.stemmer)
    find = _WORD.findall

    def words(text: str) -> list[str]:
        if fold and not text.isascii():
            text = fold_accents(text)
        content = [word for word in find(text.lower()) if word not in stop]
        return content if stem is None else stem(content)

    return words


def fold_accents(text: str) -> str:
    """Remove accents from letters.

    >>> fold_accents("Beyoncé, ʿAḍud")
    'Beyonce, ʿAdud'
    """
    characters = unicodedata.normalize("NFKD", text)
    return "".join(char for char in characters if not unicodedata.combining(char))


def _stopwords(name: str | None, fold: bool) -> frozenset[str]:
    if name is None:
        return frozenset()
    from bm25s import stopwords

    short = {"english": "EN", "english_plus": "EN_PLUS"}
    words = getattr(stopwords, f"STOPWORDS_{short.get(name, name.upper())}", None)
    if words is None:
        raise RetrievalError(
            f"retriever.stopwords: bm25s has no list {name!r}; use english, or null for no list"
        )
    if fold:
        words = map(fold_accents, words)
    return frozenset(words)


def _stemmer(language: str | None) -> Callable[[list[str]], list[str]] | None:
    if language is None:
        return None
    try:
        stemmer = import_optional("Stemmer", "PyStemmer", "stemming").Stemmer(language)
    except KeyError as error:
        raise RetrievalError(
            f"retriever.stemmer: unknown language {language!r}; use english or null"
        ) from error
    lock = threading.Lock()  # stemmers are not thread-safe

    def stems(words: list[str]) -> list[str]:
        with lock:
            return list(stemmer.stemWords(words))

    return stems
