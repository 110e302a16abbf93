"""Documents in an index directory: two memory-mapped files, and two more if the documents are chunks.

::

    documents.bin   id, title and text of each document, concatenated, in UTF-8
    documents.npy   (3 n_documents + 1,) int64 start offsets in documents.bin; the last offset is the file size
    parents.bin     parent of each document, concatenated, in UTF-8; empty for a document that is not a chunk
    parents.npy     (n_documents + 1,) int64 start offsets in parents.bin
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from leret.core.errors import RetrievalError
from leret.core.files import atomic_file
from leret.core.types import Document, Passage, Ranking
from leret.retrieval.base import Documents

_DOCUMENTS, _PARENTS = "documents", "parents"

_MAX_CACHED = 1 << 16  # maximum number of decoded documents in memory; searches often return the same documents

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
        self._parents: tuple[NDArray[np.int64], Any] | None = None
        try:
            self._starts, self._bytes = _mapped(directory, _DOCUMENTS)
            if self._starts.size % 3 != 1:
                raise ValueError("documents.npy does not match documents.bin")
            if (directory / f"{_PARENTS}.npy").exists():
                self._parents = _mapped(directory, _PARENTS)
                if self._parents[0].size != len(self) + 1:
                    raise ValueError("parents.npy does not match documents.npy")
        except (OSError, ValueError, EOFError) as error:
            raise RetrievalError(f"{directory}: cannot read the documents ({error}); build the index again") from error

    @cached_property
    def parents(self) -> dict[str, str]:
        """The parent's id by chunk; empty if no document is a chunk."""
        if self._parents is None:
            return {}
        return {doc_id: parent for row, doc_id in enumerate(self) if (parent := self._parent(row)) is not None}

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> Ranking:
        decoded, read, passages = self._decoded, self._bytes, []
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
                    self._parent(row),
                )
            doc_id, title, text, parent = document
            passages.append(_new_passage(Passage, (doc_id, title, text, score, parent)))  # faster than Passage(...)
        return tuple(passages)

    def _parent(self, row: int) -> str | None:
        if self._parents is None:
            return None
        starts, read = self._parents
        start, end = starts[row : row + 2].tolist()
        return str(read[start:end], "utf-8", "surrogatepass") or None

    def __iter__(self) -> Iterator[str]:
        starts = self._starts
        for row in range(len(self)):
            start, end = starts[3 * row : 3 * row + 2].tolist()
            yield str(self._bytes[start:end], "utf-8", "surrogatepass")

    def __len__(self) -> int:
        return len(self._starts) // 3


def write_documents(corpus: Documents, directory: Path) -> None:
    """Write the files that `MappedDocuments` reads, unless the files exist."""
    if (directory / f"{_DOCUMENTS}.npy").exists():  # written last
        return
    if corpus.parents:
        _write(directory, _PARENTS, len(corpus), (corpus.parents.get(doc_id, "") for doc_id in corpus))
    documents: Iterator[Document] = map(corpus.__getitem__, corpus)
    _write(directory, _DOCUMENTS, 3 * len(corpus), (part for d in documents for part in (d.doc_id, d.title, d.text)))


def _write(directory: Path, name: str, n: int, parts: Iterable[str]) -> None:
    starts = np.zeros(n + 1, np.int64)
    end = 0
    with atomic_file(directory / f"{name}.bin", "wb") as file:
        for entry, part in enumerate(parts, 1):
            encoded = part.encode("utf-8", "surrogatepass")
            file.write(encoded)
            end += len(encoded)
            starts[entry] = end
    with atomic_file(directory / f"{name}.npy", "wb") as file:
        np.save(file, starts)


def _mapped(directory: Path, name: str) -> tuple[NDArray[np.int64], Any]:
    """Return the start offsets and the bytes written by `_write`. Raise ValueError if they do not match."""
    starts = np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    size = (directory / f"{name}.bin").stat().st_size
    if (starts.dtype, starts.ndim) != (np.int64, 1) or not starts.size or (starts[0], starts[-1]) != (0, size):
        raise ValueError(f"{name}.npy does not match {name}.bin")
    if (starts[1:] < starts[:-1]).any():
        raise ValueError(f"the offsets in {name}.npy are not sorted")
    with open(directory / f"{name}.bin", "rb") as file:
        return starts, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
