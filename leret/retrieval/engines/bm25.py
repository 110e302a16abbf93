"""BM25 over an index of bm25s, mapped into memory; ``bm25s.BM25.load`` can open the directory too.

bm25s has the inner loop (`top_k`) too. This one breaks ties by document order (bm25s's heap returns either of two equal
documents), leaves out documents without a word of the query, and is compiled once per machine instead of once per
process.
"""

from __future__ import annotations

import json
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
from leret.retrieval.index.documents import DocumentTable, InMemoryDocuments, MappedDocuments
from leret.retrieval.index.manifest import IndexEngine, Manifest, write_index

_WORD = re.compile(r"\b\w\w+\b")
_FEW = 64  # results of a batch below which NumPy is slower than Python
_SPARSE = 2  # scan all documents if more than one in this many has a word of the query
_BLOCK = 16  # documents skipped at once
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
        self.index = index
        self.source: Any = None  # see leret.retrieval.load.retriever_record
        self.n_documents = len(documents)
        self.digest = BM25Index(settings).digest(documents.digest)
        self.words = make_analyzer(settings)
        self.ranking = documents.passages

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
        top_k(
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

    def open(self, directory: Path, documents: DocumentTable) -> BM25:
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


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no directory is writable for the cache
        return numba.njit(nogil=True, **options)(function)


@_compiled
def _worse(score: float, document: int, other_score: float, other_document: int) -> bool:
    """Return whether an entry ranks below another: a lower score, or an equal score and a later document."""
    return score < other_score or (score == other_score and document > other_document)


@_compiled
def _replace_worst(scores: NDArray[np.float32], documents: NDArray[np.int32], score: float, document: int) -> None:
    """Replace the worst entry, on top of the heap, by a better one, and restore the heap."""
    n, hole, child = len(scores), 0, 1
    while child < n:
        right = child + 1
        if right < n and _worse(scores[right], documents[right], scores[child], documents[child]):
            child = right
        if not _worse(scores[child], documents[child], score, document):
            break
        scores[hole], documents[hole] = scores[child], documents[child]
        hole, child = child, 2 * child + 1
    scores[hole], documents[hole] = score, document


@_compiled
def top_k(
    words: NDArray[np.int32],
    starts: NDArray[np.int64],
    data: NDArray[np.float32],
    indices: NDArray[np.uint32],
    indptr: NDArray[np.int64],
    best_documents: NDArray[np.int32],
    best_scores: NDArray[np.float32],
    n_documents: int,
) -> None:
    """Fill in the best documents of each query, unordered; unused places keep their score of 0."""
    scores = np.zeros(n_documents + _BLOCK, np.float32)  # whole blocks; all 0 again after each query
    for query in range(len(starts) - 1):
        columns = words[starts[query] : starts[query + 1]]
        n_entries = 0
        for word in columns:
            among, weights = indices[indptr[word] : indptr[word + 1]], data[indptr[word] : indptr[word + 1]]
            n_entries += len(among)
            for entry in range(len(among)):
                scores[among[entry]] += weights[entry]
        heap_scores, heap = best_scores[query], best_documents[query]  # a heap from the start: all its scores are 0
        if _SPARSE * n_entries < n_documents:
            _among_touched(columns, indices, indptr, scores, heap_scores, heap)
        else:
            _among_all(scores, n_documents, heap_scores, heap)


@_compiled
def _among_touched(
    columns: NDArray[np.int32],
    indices: NDArray[np.uint32],
    indptr: NDArray[np.int64],
    scores: NDArray[np.float32],
    heap_scores: NDArray[np.float32],
    heap: NDArray[np.int32],
) -> None:
    """Keep the best of the documents with a word of the query, by a second walk along its words."""
    lowest, above_0 = heap_scores[0], np.float32(1e-45)
    for word in columns:
        among = indices[indptr[word] : indptr[word + 1]]
        for entry in range(len(among)):
            document = among[entry]
            score = scores[document]
            scores[document] = 0  # skipped at the next word that has this document too
            # one comparison, nearly always false: twice as fast as a branch on `score > 0` before it
            if score >= max(lowest, above_0) and _worse(lowest, heap[0], score, document):
                _replace_worst(heap_scores, heap, score, document)
                lowest = heap_scores[0]


@partial(_compiled, fastmath={"nnan", "nsz"})  # required for a vectorized maximum
def _among_all(
    scores: NDArray[np.float32], n_documents: int, heap_scores: NDArray[np.float32], heap: NDArray[np.int32]
) -> None:
    """Keep the best of all documents; a block without a score that is high enough is skipped."""
    lowest = heap_scores[0]
    for start in range(0, n_documents, _BLOCK):
        highest = np.float32(0)
        for i in range(start, start + _BLOCK):
            highest = max(highest, scores[i])
        if highest > lowest:
            for i in range(start, start + _BLOCK):
                if scores[i] > lowest:  # an equal score belongs to a later document, so it is worse
                    _replace_worst(heap_scores, heap, scores[i], i)
                    lowest = heap_scores[0]
    scores[:] = 0


def make_analyzer(settings: AnalyzerSettings) -> Callable[[str], list[str]]:
    """Return a thread-safe function from text to lower-case words of at least two characters, without stop words.

    With ``fold_accents`` off the words are those of ``bm25s.tokenize``.
    """
    stop = _stopwords(settings.stopwords, settings.fold_accents)
    fold, stem = settings.fold_accents, _stemmer(settings.stemmer)
    find = _WORD.findall

    def words(text: str) -> list[str]:
        if fold and not text.isascii():
            text = fold_accents(text)
        content = [word for word in find(text.lower()) if word not in stop]
        return content if stem is None else stem(content)

    return words


def fold_accents(text: str) -> str:
    """Remove the marks on letters.

    >>> fold_accents("Beyoncé, ʿAḍud")
    'Beyonce, ʿAdud'
    """
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))


def _stopwords(name: str | None, fold: bool) -> frozenset[str]:
    if name is None:
        return frozenset()
    from bm25s import stopwords

    short = {"english": "EN", "english_plus": "EN_PLUS"}
    words = getattr(stopwords, f"STOPWORDS_{short.get(name, name.upper())}", None)
    if words is None:
        raise RetrievalError(f"retriever.stopwords: bm25s has no list {name!r}; use english, or null for none")
    return frozenset(fold_accents(word) if fold else word for word in words)


def _stemmer(language: str | None) -> Callable[[list[str]], list[str]] | None:
    if language is None:
        return None
    try:
        stem = import_optional("Stemmer", "PyStemmer", "stemming").Stemmer(language).stemWords
    except KeyError as error:
        raise RetrievalError(f"retriever.stemmer: no Snowball language {language!r}; use english or null") from error
    lock = threading.Lock()  # stemmers are stateful

    def stems(words: list[str]) -> list[str]:
        with lock:
            return list(stem(words))

    return stems
