import pytest
from hypothesis import given
from hypothesis import strategies as st

from leret.core.errors import DataError
from leret.core.types import Document
from leret.datasets.corpus import Corpus, find

_TEXT = st.text(st.characters(codec=None), max_size=30)
_PARTS = st.builds(Document, _TEXT, _TEXT, _TEXT, st.none() | _TEXT)
_DOCUMENTS = st.lists(_PARTS, max_size=8, unique_by=lambda document: document.doc_id)


@given(_DOCUMENTS, _DOCUMENTS)
def test_documents_come_back_in_order_and_the_digest_names_them(one, two):
    assert list(Corpus(one).items()) == [(document.doc_id, document) for document in one]
    assert (Corpus(one).digest == Corpus(two).digest) == (one == two)


def test_a_word_moved_from_title_to_text_changes_the_digest():
    assert Corpus([Document("d", "a b", "c")]).digest != Corpus([Document("d", "a ", "bc")]).digest


def test_an_id_twice_is_refused():
    with pytest.raises(DataError, match="'d'"):
        Corpus([Document("d", "", "x"), Document("d", "", "y")])


def test_the_first_chunk_stands_for_its_parent():
    chunks = [Document(f"a#{i}", "T", f"text {i}", "a") for i in range(2)]
    corpus = Corpus([Document("b", "", "whole"), *chunks])
    assert corpus.parents == {"a#0": "a", "a#1": "a"}
    assert [find(corpus, doc_id) for doc_id in ("a", "a#1", "b", "c")] == [*chunks, corpus["b"], None]


def test_the_digest_of_a_corpus_without_parents_is_that_of_older_versions():
    assert Corpus([Document("d", "a", "b")]).digest == "46d9e234903ec41c43843ba8b54ac7d0"
