import pytest

from leret.core.errors import RetrievalError
from leret.core.types import Document, Passage
from leret.datasets.corpus import Corpus
from leret.retrieval.index.documents import DocumentTable, write_documents

CORPUS = Corpus([Document("é", "", "a\ud800b"), Document("b\0", "Title", "", "p"), Document("c", "T", "x" * 99, "p")])


@pytest.fixture
def folder(tmp_path):
    write_documents(CORPUS, tmp_path)
    return tmp_path


def test_documents_and_parents_are_read_as_written(folder):
    mapped, memory = DocumentTable.open(folder, CORPUS.digest), DocumentTable.of(CORPUS)
    assert list(mapped) == list(CORPUS)
    assert len(mapped) == 3
    assert mapped.parents == CORPUS.parents == {"b\0": "p", "c": "p"}
    first, last = Passage("c", "T", "x" * 99, 2.0, "p"), Passage("é", "", "a\ud800b", 1.0)
    for table in (mapped, mapped, memory):  # decoded, then cached
        assert table.passages([2, 0], [2.0, 1.0]) == (first, last)
    assert DocumentTable.of(Corpus([Document("a", "", "x")])).parents == {}


def test_a_cut_file_is_refused(folder):
    path = folder / "documents.arrow"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RetrievalError, match="cannot read the documents"):
        DocumentTable.open(folder, CORPUS.digest)
