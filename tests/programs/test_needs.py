import pytest

from leret.core.types import Passage
from leret.programs import needs
from leret.programs.needs import Finished, NeedsCompletion, NeedsSearch, PredictorCall, difference, place
from leret.programs.search import SearchCall

A, B = (SearchCall(1, ("q",), ((Passage(name, "", "", 1.0),),)) for name in "ab")


def need(predictor="write", *, searches=(), **inputs):
    return NeedsCompletion(PredictorCall(predictor, inputs), searches)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (need(x="1"), need(x="2"), 'write.x was "1" in one run, and "2" in another'),
        (need(searches=(A,)), need(searches=(B,)), "returned [['a']] in one run, [['b']] in another"),
        (need(), need("read"), "a call of write with {}, another a call of read with {}"),
        (need(), NeedsSearch(("q", 3)), 'another a search for ["q", 3]'),
        (Finished({"a": 1}, ()), Finished({"a": 2}, ()), 'the end with prediction {"a": 1}'),
    ],
)
def test_what_differs_is_told_with_both_values(one, other, told):
    assert place(one) == place(one)
    assert place(one) != place(other)
    assert told in difference(one, other)


def test_of_branches_side_by_side_a_search_goes_first():
    branches = [need("b"), need("a", x="2"), need("a", x="1"), NeedsSearch("q")]
    assert sorted(branches, key=needs.order) == branches[::-1]
