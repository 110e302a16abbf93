import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leret.core.errors import DataError
from leret.core.types import Document
from leret.datasets.corpus import Corpus, find

_TEXT = st.text(st.characters(codec=None), max_size=8)
_PARTS = st.builds(Document, _TEXT, _TEXT, _TEXT, st.none() | _TEXT)
_DOCUMENTS = st.lists(_PARTS, max_size=4, unique_by=lambda document: document.doc_id)


@settings(max_examples=25)
@given(_DOCUMENTS, _DOCUMENTS)
def test_documents_come_back_in_order_and_the_digest_names_them(one, two):
    assert list(Corpus(one).items()) == [(document.doc_id, document) for document in one]
    assert (Corpus(one).digest == Corpus(two).digest) == (one == two)


def test_the_digest_is_that_of_older_versions_and_knows_title_from_text():
    assert Corpus([Document("d", "a", "b")]).digest == "46d9e234903ec41c43843ba8b54ac7d0"
    assert Corpus([Document("d", "a b", "c")]).digest != Corpus([Document("d", "a ", "bc")]).digest


def test_the_first_chunk_stands_for_its_parent_and_an_id_twice_is_refused():
    chunks = [Document(f"a#{i}", "T", f"text {i}", "a") for i in range(2)]
    corpus = Corpus([Document("b", "", "whole"), *chunks])
    assert corpus.parents == {"a#0": "a", "a#1": "a"}
    assert [find(corpus, doc_id) for doc_id in ("a", "a#1", "b", "c")] == [*chunks, corpus["b"], None]
    with pytest.raises(DataError, match="'b'"):
        Corpus([*corpus.values(), Document("b", "", "y")])
