import pytest

from leret.core.errors import RetrievalError
from leret.core.types import Document, Passage
from leret.datasets.corpus import Corpus
from leret.retrieval.index.documents import DocumentTable, write_documents

CORPUS = Corpus([Document("é", "", "a\ud800b"), Document("b\0", "Title", ""), Document("c", "T", "x" * 99)])


@pytest.fixture
def folder(tmp_path):
    write_documents(CORPUS, tmp_path)
    return tmp_path


def test_documents_are_read_as_written(folder):
    mapped, memory = DocumentTable.open(folder, CORPUS.digest), DocumentTable.of(CORPUS)
    assert list(mapped) == list(CORPUS)
    assert len(mapped) == 3
    first, last = Passage("c", "T", "x" * 99, 2.0), Passage("é", "", "a\ud800b", 1.0)
    for table in (mapped, mapped, memory):  # decoded, then cached
        assert table.passages([2, 0], [2.0, 1.0]) == (first, last)


def test_a_cut_file_is_refused(folder):
    path = folder / "documents.arrow"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RetrievalError, match="cannot read the documents"):
        DocumentTable.open(folder, CORPUS.digest)


def test_parents_are_read_as_written_and_older_indexes_have_none(tmp_path, folder):
    corpus = Corpus([Document("a#0", "", "x", "a"), Document("b", "", "y"), Document("a#1", "", "z", "a")])
    write_documents(corpus, tmp_path / "chunks")
    mapped = DocumentTable.open(tmp_path / "chunks", corpus.digest)
    assert mapped.parents == corpus.parents
    for table in (mapped, mapped, DocumentTable.of(corpus)):
        assert [passage.parent for passage in table.passages([2, 1, 0], [3.0, 2.0, 1.0])] == ["a", None, "a"]
    assert DocumentTable.open(folder, "").parents == {}
