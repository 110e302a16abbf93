import numpy as np
import pytest

from leret.core.errors import RetrievalError
from leret.core.types import Document, Passage
from leret.datasets.corpus import Corpus
from leret.retrieval.index.documents import InMemoryDocuments, MappedDocuments, write_documents

CORPUS = Corpus([Document("é", "", "a\ud800b"), Document("b\0", "Title", ""), Document("c", "T", "x" * 99)])


@pytest.fixture
def folder(tmp_path):
    write_documents(CORPUS, tmp_path)
    return tmp_path


def test_documents_are_read_as_written(folder):
    mapped, memory = MappedDocuments(folder, CORPUS.digest), InMemoryDocuments(CORPUS)
    assert list(mapped) == list(CORPUS)
    assert len(mapped) == 3
    first, last = Passage("c", "T", "x" * 99, 2.0), Passage("é", "", "a\ud800b", 1.0)
    for table in (mapped, mapped, memory):  # decoded, then cached
        assert table.passages([2, 0], [2.0, 1.0]) == (first, last)


@pytest.mark.parametrize(("place", "value", "match"), [(3, 0, "npy are not sorted"), (0, 1, "match"), (-1, 5, "match")])
def test_mismatched_files_are_refused(folder, place, value, match):
    starts = np.load(folder / "documents.npy")
    starts[place] = value
    np.save(folder / "documents.npy", starts)
    with pytest.raises(RetrievalError, match=match):
        MappedDocuments(folder, CORPUS.digest)


def test_parents_are_read_as_written_and_older_indexes_have_none(tmp_path, folder):
    corpus = Corpus([Document("a#0", "", "x", "a"), Document("b", "", "y"), Document("a#1", "", "z", "a")])
    write_documents(corpus, tmp_path / "chunks")
    mapped = MappedDocuments(tmp_path / "chunks", corpus.digest)
    assert mapped.parents == corpus.parents
    for table in (mapped, mapped, InMemoryDocuments(corpus)):
        assert [passage.parent for passage in table.passages([2, 1, 0], [3.0, 2.0, 1.0])] == ["a", None, "a"]
    assert (MappedDocuments(folder, "").parents, (folder / "parents.parquet").exists()) == ({}, False)
    (folder / "parents.parquet").write_bytes((tmp_path / "chunks/parents.parquet").read_bytes()[:-9])
    with pytest.raises(RetrievalError, match="cannot read the documents"):
        MappedDocuments(folder, CORPUS.digest)
