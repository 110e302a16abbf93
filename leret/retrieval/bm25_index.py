"""The files of a BM25 index: made by bm25s, mapped into memory.

::

    *.csc.index.npy             the score matrix, one column a word
    vocab.index.json            words to columns
    params.index.json           so that ``bm25s.BM25.load`` can open the directory as well
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leret.errors import RetrievalError
from leret.retrieval.documents import Documents
from leret.retrieval.words import WordSettings, tokenizer

__all__ = ["Index", "IndexSettings", "make_index", "read_index"]

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
