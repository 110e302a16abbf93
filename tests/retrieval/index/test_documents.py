"""The documents of an index: what is written is what is read, and files that do not fit are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from leret.core.errors import RetrievalError
from leret.core.types import Document, Passage
from leret.datasets.corpus import Corpus
from leret.retrieval.index.documents import InMemoryDocuments, MappedDocuments, Passages, write_documents

CORPUS = Corpus([Document("é", "", "a\ud800b"), Document("b\0", "Title", ""), Document("c", "T", "x" * 99)])


def test_what_is_written_is_what_is_read_by_row_and_by_id(tmp_path: Path) -> None:
    write_documents(CORPUS, tmp_path)
    mapped, memory = MappedDocuments(tmp_path, CORPUS.digest), InMemoryDocuments(CORPUS)
    assert [mapped.at(row) for row in range(3)] == [memory.at(row) for row in range(3)]
    assert {doc_id: mapped[doc_id] for doc_id in mapped} == dict(CORPUS.items())
    assert (len(mapped), mapped.content_digest()) == (3, CORPUS.digest)
    assert Passages(mapped).ranking([2, 0], [2.0, 1.0]) == (
        Passage("c", "T", "x" * 99, 2.0),
        Passage("é", "", "a\ud800b", 1.0),
    )


def test_documents_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    write_documents(CORPUS, tmp_path)
    write_documents(Corpus([]), tmp_path)  # a build that goes on
    assert len(MappedDocuments(tmp_path, CORPUS.digest)) == 3


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [(3, 0, "documents.npy is not in order"), (0, 1, "do not fit together"), (-1, 5, "do not fit together")],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, place: int, value: int, match: str) -> None:
    write_documents(CORPUS, tmp_path)
    starts = np.load(tmp_path / "documents.npy")
    starts[place] = value
    np.save(tmp_path / "documents.npy", starts)
    with pytest.raises(RetrievalError, match=match):
        MappedDocuments(tmp_path, CORPUS.digest)
