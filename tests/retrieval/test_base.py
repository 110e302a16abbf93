"""What engines share: which queries they are asked, k, and batches of which a part failed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leret.core.errors import RetrievalError
from leret.core.types import Passage
from leret.retrieval.base import PartialResultsError, clip_k, has_terms, raise_if_partial, search_valid, to_valid_utf8


@given(st.lists(st.text(st.characters(codec=None))))
def test_an_engine_gets_valid_text_with_terms_and_its_rankings_find_their_queries(queries):
    def search(asked):
        assert asked
        assert all(has_terms(query) and query.encode() for query in asked)
        return [(Passage(query, "", "", 1.0),) for query in asked]

    found = search_valid(queries, search)
    assert found == [(Passage(to_valid_utf8(q), "", "", 1.0),) if has_terms(q) else () for q in queries]


def test_k_is_at_most_all():
    assert (clip_k(3, 9), clip_k(30, 9)) == (3, 9)


def test_the_first_failure_of_a_batch_brings_what_was_answered():
    first, second = RetrievalError("down").failed(), RetrievalError("refused")
    with pytest.raises(PartialResultsError, match="down") as caught:
        raise_if_partial(["a", "b", "c"], [(), first, second])
    assert (caught.value.answered, caught.value.exit_code) == ({"a": ()}, 1)
