"""The files of a BM25 index: made by bm25s, mapped into memory.

::

    *.csc.index.npy             the score matrix, one column a word
    vocab.index.json            words to columns
    params.index.json           so that ``bm25s.BM25.load`` can open the directory as well
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from leret.core.errors import RetrievalError
from leret.core.progress import Progress
from leret.core.types import Ranking, digest
from leret.retrieval.base import Documents
from leret.retrieval.engines.analysis import WordSettings, tokenizer
from leret.retrieval.index.documents import Held, Passages, Placed, StoredDocuments
from leret.retrieval.index.manifest import Manifest, fitting_documents, read_manifest, write_index

_MEND = "build it again"


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """All that decides an index, beside the corpus.

    Attributes:
        k1: how slowly the count of a word saturates, at least 0.
        b: how far long documents are marked down, in [0, 1].
        words: how text becomes words.
    """

    k1: float = 1.5
    b: float = 0.75
    words: WordSettings = field(default_factory=WordSettings)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> IndexSettings:
        """The settings that `as_dict` gave, or part of them."""
        words = {name: values[name] for name in ("stopwords", "stemmer", "fold_accents") if name in values}
        rest = {name: values[name] for name in ("k1", "b") if name in values}
        return cls(**rest, words=WordSettings(**words))

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values, as the manifest holds them."""
        return {"method": "lucene", "k1": self.k1, "b": self.b, **asdict(self.words)}


@dataclass(frozen=True, slots=True)
class Index:
    """The score matrix by columns.

    Attributes:
        vocabulary: words to columns.
        data: (n_entries,) weight of a word in a document.
        indices: (n_entries,) the document of each weight, by its place in the corpus.
        indptr: (n_words + 1,) where each column starts.
    """

    vocabulary: Mapping[str, int]
    data: NDArray[np.float32]
    indices: NDArray[np.int32]
    indptr: NDArray[np.int64]


def make_index(corpus: Documents, settings: IndexSettings, directory: Path | None) -> Index:
    """Index ``title. text`` of every document.

    Args:
        corpus: what is indexed.
        settings: of the index.
        directory: an existing one to write the files to; None keeps the index in memory.

    Raises:
        RetrievalError: no document has a word, or a setting is out of range.
        OSError: the directory cannot be written.
    """
    engine = _engine(corpus, settings)
    if directory is not None:
        engine.save(directory, show_progress=False)
        return read_index(directory, len(corpus))
    scores = engine.scores
    return _index(engine.vocab_dict, scores["data"], scores["indices"], scores["indptr"])


def read_index(directory: Path, n_documents: int) -> Index:
    """An index, its arrays mapped into memory.

    Places and columns are read through once: the search looks them up without bounds.

    Raises:
        RetrievalError: a file is missing or broken, or an entry points outside of the index.
    """
    try:
        vocabulary = json.loads((directory / "vocab.index.json").read_text(encoding="utf-8"))
        arrays = [
            np.load(directory / f"{name}.csc.index.npy", mmap_mode="r", allow_pickle=False)
            for name in ("data", "indices", "indptr")
        ]
        index = _index(vocabulary, *arrays)
        columns = np.fromiter(vocabulary.values(), np.int64, len(vocabulary)).view(np.uint64)
    except (OSError, ValueError, EOFError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RetrievalError(f"{directory}: the index cannot be read ({error}); {_MEND}") from error
    n, starts = len(index.data), index.indptr
    fits = all(array.ndim == 1 for array in arrays) and (len(starts), len(index.indices)) == (len(columns) + 1, n)
    if (
        not fits
        or (starts[0], starts[-1]) != (0, n)
        or (starts[1:] < starts[:-1]).any()
        or columns.max(initial=0) >= len(columns)
    ):
        raise RetrievalError(f"{directory}: the index files do not fit together; {_MEND}")
    highest = int(index.indices.view(np.uint32).max(initial=0))  # a negative place is a very high one
    if highest >= n_documents:
        raise RetrievalError(
            f"{directory}: the index names document {highest}, and there are {n_documents} from 0 on; {_MEND}"
        )
    return index


def _engine(corpus: Documents, settings: IndexSettings) -> Any:
    import bm25s

    if not (0 <= settings.k1 < math.inf and 0 <= settings.b <= 1):
        raise RetrievalError(
            f"retriever: k1={settings.k1}, b={settings.b}; k1 is a number of at least 0, and b is from 0 to 1"
        )
    words = tokenizer(settings.words)
    vocabulary: dict[str, int] = {}
    columns = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in words(f"{document.title}. {document.text}")]
        for document in map(corpus.__getitem__, corpus)
    ]
    if not vocabulary:
        raise RetrievalError(f"none of the {len(corpus)} documents has a word that can be indexed; look at the corpus")
    engine = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene", backend="numpy")
    engine.index((columns, vocabulary), create_empty_token=False, show_progress=False)
    return engine


def _index(vocabulary: Mapping[str, int], data: Any, indices: Any, indptr: Any) -> Index:
    """Arrays of one type, read-only, so that the search is compiled for one signature."""
    arrays = []
    for values, dtype in ((data, np.float32), (indices, np.int32), (indptr, np.int64)):
        array = np.ascontiguousarray(values, dtype).view(np.ndarray)
        array.flags.writeable = False
        arrays.append(array)
    return Index(vocabulary, *arrays)


pass


_CELLS = 1 << 22
"""Places of the result matrix at once: bounds the memory of a large batch with a large k."""


class BM25:
    """Finds documents by their words. Made by `BM25.build`, `BM25.open` or `open_or_build`; safe for many threads.

    Documents that share no word with a query are not returned. Equal scores stand in the order of the corpus.

    Args:
        documents: where passages take their title and text from.
        index: of ``documents``.
        settings: that ``index`` was built with.
    """

    only_computes: ClassVar[bool] = True  # a search waits for nothing but the processor

    def __init__(self, documents: Placed, index: Index, settings: IndexSettings) -> None:
        self._passages = Passages(documents)
        self._index = index
        self._settings = settings
        self._n_documents = len(documents)
        self.digest = BM25Engine(settings).digest(documents.digest)
        self._words = tokenizer(settings.words)
        self._lock = threading.Lock()  # a stemmer keeps a state

    @classmethod
    def build(
        cls,
        corpus: Documents,
        directory: Path | None = None,
        *,
        k1: float = 1.5,
        b: float = 0.75,
        stopwords: str | None = "english",
        stemmer: str | None = None,
        fold_accents: bool = True,
    ) -> BM25:
        """Index a corpus.

        Args:
            corpus: what is indexed.
            directory: where to keep the index; None keeps it in memory.
            k1: how slowly the count of a word saturates, at least 0.
            b: how far long documents are marked down, in [0, 1].
            stopwords: name of a list of bm25s, or None.
            stemmer: Snowball language for PyStemmer, or None.
            fold_accents: take letters with and without accents for the same.

        Raises:
            RetrievalError: a setting is wrong, no document has a word, or the directory cannot be written.
        """
        settings = IndexSettings(k1, b, WordSettings(stopwords, stemmer, fold_accents))
        if directory is None:
            return cls(Held(corpus), make_index(corpus, settings, None), settings)
        write_index(BM25Engine(settings), corpus, directory)
        return cls.open(directory, corpus)

    @classmethod
    def open(cls, directory: Path, corpus: Documents) -> BM25:
        """A saved index, mapped into memory.

        Raises:
            RetrievalError: there is none, it is broken, or it is of another corpus.
        """
        manifest = read_manifest(directory)
        manifest.require(corpus, directory)
        if manifest.engine != BM25Engine.kind:
            raise RetrievalError(f"{directory} is an index of kind {manifest.engine}, not bm25; name another directory")
        engine = BM25Engine.again(manifest)
        return engine.open(directory, fitting_documents(manifest, engine, directory))

    @property
    def index(self) -> Index:
        """The score matrix, for engines on top of this one."""
        return self._index

    @property
    def n_documents(self) -> int:
        """In the index."""
        return self._n_documents

    def words(self, text: str) -> list[str]:
        """The words of a text as the index has them."""
        with self._lock:
            return self._words(text)

    def passages(self, places: Sequence[int], scores: Sequence[float]) -> Ranking:
        """Documents by their places in the corpus."""
        return self._passages.ranking(places, scores)

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query.

        Args:
            queries: any strings; one without a known word gets an empty ranking.
            k: documents a query, at least 1; may be more than there are.

        Returns:
            One ranking a query, in the order of the queries; scores above 0, not increasing.

        Raises:
            RetrievalError: ``k`` is less than 1.
        """
        if k < 1:
            raise RetrievalError(f"k is {k}; ask for one document at least")
        k = min(k, self._n_documents)
        at_once = max(1, _CELLS // k)
        return [
            self._passages.ranking(documents, scores)
            for start in range(0, len(queries), at_once)
            for documents, scores in self._best(queries[start : start + at_once], k)
        ]

    def _best(self, queries: Sequence[str], k: int) -> Iterator[tuple[list[int], list[float]]]:
        from leret.retrieval.engines.bm25_topk import top_k

        columns = [self._columns(query) for query in queries]
        starts = np.cumsum([0, *map(len, columns)], dtype=np.int64)
        words = np.fromiter((column for query in columns for column in query), np.int32, int(starts[-1]))
        documents = np.zeros((len(queries), k), np.int32)
        scores = np.zeros((len(queries), k), np.float32)
        index = self._index
        top_k(
            words, starts, index.data, index.indices.view(np.uint32), index.indptr, documents, scores, self._n_documents
        )
        return _sorted(documents, scores)

    def _columns(self, query: str) -> list[int]:
        known = self._index.vocabulary
        if self._settings.words.stemmer is None:
            words = self._words(query)
        else:
            with self._lock:
                words = self._words(query)
        return [known[word] for word in words if word in known]


@dataclass(frozen=True)
class BM25Engine:
    """Builds and opens BM25 indexes.

    Attributes:
        settings_: of the index.
    """

    settings_: IndexSettings
    kind: ClassVar[str] = "bm25"
    packages: ClassVar[tuple[str, ...]] = ("bm25s",)
    resumable: ClassVar[bool] = False

    @classmethod
    def again(cls, manifest: Manifest) -> BM25Engine:
        """The engine that built an index."""
        return cls(IndexSettings.of(manifest.settings))

    def settings(self) -> dict[str, Any]:
        """All that decides the rankings."""
        return self.settings_.as_dict()

    def places(self) -> dict[str, str]:
        """Nothing outside the directory is needed."""
        return {}

    def digest(self, corpus: str) -> str:
        """Of the retriever."""
        return digest("bm25s", self.settings(), corpus)

    def write(self, corpus: Documents, directory: Path, told: Progress) -> None:
        """Index the corpus."""
        told.start("index words", len(corpus))
        make_index(corpus, self.settings_, directory)
        told.advance(len(corpus))
        told.finish()

    def open(self, directory: Path, documents: StoredDocuments) -> BM25:
        """A saved index."""
        return BM25(documents, read_index(directory, len(documents)), self.settings_)


def open_or_build(corpus: Documents, directory: Path, **settings: Any) -> BM25:
    """The index that a directory holds, or a new one in its place where it holds another, or none.

    Args:
        corpus: what is searched.
        directory: of the index; written whole or not at all.
        settings: keyword arguments of `BM25.build`.

    Raises:
        RetrievalError: as `BM25.build`.
    """
    engine = BM25Engine(IndexSettings.of(settings))
    try:
        if read_manifest(directory).is_of(Manifest.planned(engine, corpus)):
            return BM25.open(directory, corpus)
    except RetrievalError:
        pass
    return BM25.build(corpus, directory, **settings)


def _sorted(documents: NDArray[np.int32], scores: NDArray[np.float32]) -> Iterator[tuple[list[int], list[float]]]:
    """Each query's documents and scores, best first, without the unused places."""
    order = np.lexsort((documents, -scores), axis=-1)
    found = (scores > 0).sum(axis=-1)
    best = np.take_along_axis(documents, order, axis=-1)
    high = np.take_along_axis(scores, order, axis=-1)
    for i, n in enumerate(found):
        yield best[i, :n].tolist(), high[i, :n].tolist()
