"""Documents in an Arrow table: in memory, or in ``documents.arrow`` of an index directory, which is memory-mapped.

The columns ``doc_id``, ``title``, ``text`` and ``parent`` (null for a document that is not a chunk)
hold UTF-8 with lone surrogates, which JSON may contain; Arrow calls them binary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from leret.core.errors import RetrievalError
from leret.core.files import atomic_file
from leret.core.types import Passage, Ranking
from leret.retrieval.base import Documents

_FILE = "documents.arrow"
_COLUMNS = ("doc_id", "title", "text", "parent")
_BATCH = 10_000  # documents written at once
# maximum number of decoded documents in memory; searches often return the same documents
_MAX_CACHED = 1 << 16

_new_passage = tuple.__new__


class DocumentTable:
    """Documents by row (position in the corpus). ``digest`` is the digest of the corpus."""

    def __init__(self, table: Any, digest: str) -> None:
        self.digest = digest
        self._n_documents: int = table.num_rows
        self._columns = [table[name] for name in _COLUMNS]
        self._decoded: dict[int, list[Any]] = {}

    @classmethod
    def of(cls, corpus: Documents) -> Self:
        """Return the documents of a corpus, in memory."""
        import pyarrow as pa

        return cls(pa.Table.from_batches(_batches(corpus), _schema()), corpus.digest)

    @classmethod
    def open(cls, directory: Path, digest: str) -> Self:
        """Open the documents of an index directory, which are read from disk on demand."""
        import pyarrow as pa

        try:
            file = pa.ipc.open_file(pa.memory_map(str(directory / _FILE)))
            return cls(file.read_all(), digest)
        except (OSError, KeyError, pa.ArrowException) as error:
            raise RetrievalError(
                f"{directory}: cannot read the documents ({error}); build the index again"
            ) from error

    @cached_property
    def parents(self) -> dict[str, str]:
        """The parent's id by chunk; empty if no document is a chunk."""
        parents = {}
        if self._columns[-1].null_count < self._n_documents:
            for doc_id, parent in zip(self, self._columns[-1], strict=True):
                if parent.is_valid:
                    parents[doc_id] = _text(parent)
        return parents

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> Ranking:
        """Return the documents in ``rows`` with ``scores``, in the order of ``rows``."""
        decoded = self._decoded
        passages = []
        if len(decoded) > _MAX_CACHED:
            decoded = self._decoded = {}
        for row, score in zip(rows, scores, strict=True):
            document = decoded.get(row)
            if document is None:
                *words, parent = [column[row].as_py() for column in self._columns]
                texts = [str(encoded, "utf-8", "surrogatepass") for encoded in words]
                if parent is not None:
                    parent = str(parent, "utf-8", "surrogatepass")
                document = decoded[row] = [*texts, parent]
            doc_id, title, text, parent = document
            # faster than Passage(...)
            passages.append(_new_passage(Passage, (doc_id, title, text, score, parent)))
        return tuple(passages)

    def __iter__(self) -> Iterator[str]:
        return map(_text, self._columns[0])

    def __len__(self) -> int:
        return self._n_documents


def write_documents(corpus: Documents, directory: Path) -> None:
    """Write the file that `DocumentTable.open` reads, unless it exists."""
    import pyarrow as pa

    if (directory / _FILE).exists():
        return
    with atomic_file(directory / _FILE, "wb") as file, pa.ipc.new_file(file, _schema()) as writer:
        for batch in _batches(corpus):
            writer.write_batch(batch)


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([(name, pa.binary()) for name in _COLUMNS])


def _batches(corpus: Documents) -> Iterator[Any]:
    import pyarrow as pa

    rows: list[dict[str, bytes | None]] = []
    for document in map(corpus.__getitem__, corpus):
        texts = (document.doc_id, document.title, document.text, document.parent)
        rows.append(dict(zip(_COLUMNS, map(_encoded, texts), strict=True)))
        if len(rows) == _BATCH:
            yield pa.RecordBatch.from_pylist(rows, _schema())
            rows = []
    yield pa.RecordBatch.from_pylist(rows, _schema())


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _text(value: Any) -> Any:
    encoded = value.as_py()
    return None if encoded is None else str(encoded, "utf-8", "surrogatepass")
