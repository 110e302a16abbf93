from hypothesis import given
from hypothesis import strategies as st

from leret.core.types import Passage
from leret.retrieval.base import has_terms, search_valid, to_valid_utf8


@given(st.lists(st.text(st.characters(codec=None))))
def test_an_engine_gets_only_valid_queries_with_terms(queries):
    def search(asked):
        assert asked
        assert all(has_terms(query) and query.encode() for query in asked)
        return [(Passage(query, "", "", 1.0),) for query in asked]

    rankings = search_valid(queries, search)
    assert rankings == [(Passage(to_valid_utf8(q), "", "", 1.0),) if has_terms(q) else () for q in queries]
