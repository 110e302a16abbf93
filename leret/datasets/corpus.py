"""The corpus: the documents that a program searches."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from hashlib import blake2b

from leret.core.errors import DataError
from leret.core.types import Document

# added to the length of a parent in the digest, to distinguish it from a title, text or id
_PARENT = 1 << 63


class Corpus(Mapping[str, Document]):
    """Immutable mapping of ids to documents, in their original order.

    A duplicate id is a DataError.

    Titles and texts are stored as one block of UTF-8 bytes, which takes a third of the memory of
    Python objects.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        self.skipped: Mapping[str, int] = {}  # number of skipped and doubtful records by kind
        self.parents: dict[str, str] = {}  # parent by chunk; empty for a corpus without chunks
        self._rows: dict[str, int] = {}
        self._bytes = bytearray()
        self._ends = array("Q", [0])  # byte offsets of title, text, title, text, ...
        content = blake2b(digest_size=16)
        for document in documents:
            row = len(self._rows)
            if self._rows.setdefault(document.doc_id, row) != row:
                raise DataError(f"two documents have the id {document.doc_id!r}; make ids unique")
            texts = (document.doc_id, document.title, document.text)
            # surrogatepass: JSON may hold lone surrogates
            parts = [text.encode("utf-8", "surrogatepass") for text in texts]
            # with its length, so that moving a word from title to text changes the digest
            for part in parts:
                content.update(len(part).to_bytes(8, "big") + part)
            if document.parent is not None:
                parent = document.parent.encode("utf-8", "surrogatepass")
                content.update((len(parent) | _PARENT).to_bytes(8, "big") + parent)
                self.parents[document.doc_id] = sys.intern(document.parent)
            for part in parts[1:]:
                self._bytes += part
                self._ends.append(len(self._bytes))
        self.digest = content.hexdigest()  # digest of the ids, titles, texts and parents, in order

    @cached_property
    def first_chunks(self) -> dict[str, str]:
        """The first chunk's id by parent."""
        return {parent: doc_id for doc_id, parent in reversed(self.parents.items())}

    def __getitem__(self, doc_id: str) -> Document:
        first = 2 * self._rows[doc_id]
        start, middle, end = self._ends[first : first + 3]
        title = self._text(start, middle)
        text = self._text(middle, end)
        return Document(doc_id, title, text, self.parents.get(doc_id))

    def __contains__(self, doc_id: object) -> bool:
        return doc_id in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Corpus({len(self)} documents, digest {self.digest})"

    def _text(self, start: int, end: int) -> str:
        return self._bytes[start:end].decode("utf-8", "surrogatepass")


def find(corpus: Mapping[str, Document], doc_id: str) -> Document | None:
    """Return a document, or the first chunk of the parent ``doc_id``; None if there is neither."""
    document = corpus.get(doc_id)
    if document is None and isinstance(corpus, Corpus):
        document = corpus.get(corpus.first_chunks.get(doc_id, ""))
    return document
