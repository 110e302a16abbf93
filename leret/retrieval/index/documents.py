"""Documents in an index directory: two memory-mapped files, and a table of the chunks' parents.

::

    documents.bin    id, title and text of each document, concatenated, in UTF-8
    documents.npy    (3 n_documents + 1,) int64 start offsets in documents.bin, then its size
    parents.parquet  column "parent", one row per document; null for a document that is not a chunk
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from leret.core.errors import RetrievalError
from leret.core.files import atomic_file
from leret.core.types import Passage, Ranking, storable
from leret.retrieval.base import Documents

_BYTES, _STARTS, _PARENTS = "documents.bin", "documents.npy", "parents.parquet"


_MAX_CACHED = (
    1 << 16
)  # maximum number of decoded documents in memory; searches often return the same documents

_new_passage = tuple.__new__


class DocumentTable(Protocol):
    """Documents by row (position in the corpus). ``digest`` is the digest of the corpus."""

    digest: str

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> Ranking:
        """Return the documents in ``rows`` with ``scores``, in the order of ``rows``."""

    def __len__(self) -> int: ...


class InMemoryDocuments:
    """Documents of a corpus in memory."""

    def __init__(self, corpus: Documents) -> None:
        self.digest = corpus.digest
        self._corpus = corpus
        self._ids = tuple(corpus)

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> Ranking:
        documents = [self._corpus[self._ids[row]] for row in rows]
        pairs = zip(documents, scores, strict=True)
        return tuple([Passage(d.doc_id, d.title, d.text, score, d.parent) for d, score in pairs])

    def __len__(self) -> int:
        return len(self._ids)


class MappedDocuments:
    """Documents in an index directory, read from disk on demand."""

    def __init__(self, directory: Path, digest: str) -> None:
        self.digest = digest
        self._decoded: dict[int, tuple[str, str, str, str | None]] = {}
        self._parents: Any = None  # Arrow array; None if no document is a chunk
        try:
            self._starts = np.load(directory / _STARTS, mmap_mode="r", allow_pickle=False)
            size = (directory / _BYTES).stat().st_size
            starts = self._starts
            if (starts.dtype, starts.ndim, starts.size % 3) != (np.int64, 1, 1):
                raise ValueError(f"{_STARTS} does not match {_BYTES}")
            if starts[0] != 0 or starts[-1] != size:
                raise ValueError(f"{_STARTS} does not match {_BYTES}")
            if (starts[1:] < starts[:-1]).any():
                raise ValueError(f"the offsets in {_STARTS} are not sorted")
            with open(directory / _BYTES, "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            if (directory / _PARENTS).exists():
                import pyarrow.parquet as pq  # import takes 0.2 s

                self._parents = pq.read_table(directory / _PARENTS)["parent"].combine_chunks()
                if len(self._parents) != len(self):
                    raise ValueError(f"{_PARENTS} does not match {_STARTS}")
        except (OSError, ValueError, EOFError, KeyError) as error:
            raise RetrievalError(
                f"{directory}: cannot read the documents ({error}); build the index again"
            ) from error

    @cached_property
    def parents(self) -> dict[str, str]:
        """The parent's id by chunk; empty if no document is a chunk."""
        parents = [] if self._parents is None else self._parents.to_pylist()
        pairs = zip(self, parents, strict=False)
        return {doc_id: parent for doc_id, parent in pairs if parent is not None}

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> Ranking:
        decoded = self._decoded
        read = self._bytes
        passages = []
        if len(decoded) > _MAX_CACHED:
            decoded = self._decoded = {}
        for row, score in zip(rows, scores, strict=True):
            document = decoded.get(row)
            if document is None:
                # one slice of four offsets is faster than four NumPy scalars
                start, middle, last, end = self._starts[3 * row : 3 * row + 4].tolist()
                document = decoded[row] = (
                    str(read[start:middle], "utf-8", "surrogatepass"),
                    str(read[middle:last], "utf-8", "surrogatepass"),
                    str(read[last:end], "utf-8", "surrogatepass"),
                    None if self._parents is None else self._parents[row].as_py(),
                )
            doc_id, title, text, parent = document
            # faster than Passage(...)
            passages.append(_new_passage(Passage, (doc_id, title, text, score, parent)))
        return tuple(passages)

    def __iter__(self) -> Iterator[str]:
        starts = self._starts
        for row in range(len(self)):
            start, end = starts[3 * row : 3 * row + 2].tolist()
            yield str(self._bytes[start:end], "utf-8", "surrogatepass")

    def __len__(self) -> int:
        return len(self._starts) // 3


def write_documents(corpus: Documents, directory: Path) -> None:
    """Write the files that `MappedDocuments` reads, unless the files exist."""
    if (directory / _STARTS).exists():  # _STARTS is written last
        return
    if corpus.parents:
        _write_parents(corpus, directory / _PARENTS)
    starts = np.zeros(3 * len(corpus) + 1, np.int64)
    end = 0
    n_parts = 0
    with atomic_file(directory / _BYTES, "wb") as file:
        for document in map(corpus.__getitem__, corpus):
            for part in (document.doc_id, document.title, document.text):
                encoded = part.encode("utf-8", "surrogatepass")
                file.write(encoded)
                end += len(encoded)
                n_parts += 1
                starts[n_parts] = end
    with atomic_file(directory / _STARTS, "wb") as file:
        np.save(file, starts)


def _write_parents(corpus: Documents, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parents = []
    for doc_id in corpus:
        parent = corpus.parents.get(doc_id)
        parents.append(parent and storable(parent))
    column = pa.array(parents, pa.string()).dictionary_encode()
    with atomic_file(path, "wb") as file:
        pq.write_table(pa.table({"parent": column}), file)
