import pytest
from hypothesis import given
from hypothesis import strategies as st

from leret.core.errors import DataError
from leret.core.types import Document
from leret.datasets.corpus import Corpus

_TEXT = st.text(st.characters(codec=None), max_size=30)
_DOCUMENTS = st.lists(st.builds(Document, _TEXT, _TEXT, _TEXT), max_size=8, unique_by=lambda document: document.doc_id)


@given(_DOCUMENTS, _DOCUMENTS)
def test_documents_come_back_in_order_and_the_digest_names_them(one, two):
    assert list(Corpus(one).items()) == [(document.doc_id, document) for document in one]
    assert (Corpus(one).digest == Corpus(two).digest) == (one == two)


def test_a_word_moved_from_title_to_text_changes_the_digest():
    assert Corpus([Document("d", "a b", "c")]).digest != Corpus([Document("d", "a ", "bc")]).digest


def test_an_id_twice_is_refused():
    with pytest.raises(DataError, match="'d'"):
        Corpus([Document("d", "", "x"), Document("d", "", "y")])
