"""The cache in memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from leret.errors import RetrievalError
from leret.retrieval.base import Retriever
from leret.retrieval.cached import Cached
from leret.types import Passage, Ranking


class Counting:
    """Answers a query with itself, and remembers what it was asked."""

    digest = "counting"

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, ...], int]] = []
        self.down = False

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        if self.down:
            raise RetrievalError("down")
        self.asked.append((tuple(queries), k))
        return [tuple(Passage(f"{query}{i}", "", query, 1.0 / (i + 1)) for i in range(k)) for query in queries]


def test_a_query_is_asked_once_in_a_batch_and_once_over_batches() -> None:
    engine = Counting()
    cached = Cached(engine)
    first = cached.search(["a", "b", "a"], 2)
    assert [ranking[0].text for ranking in first] == ["a", "b", "a"]
    assert cached.search(["b", "c"], 2)[0] == first[1]
    assert engine.asked == [(("a", "b"), 2), (("c",), 2)]
    assert (cached.n_hits, cached.n_misses) == (2, 3)


def test_another_k_is_another_question() -> None:
    engine = Counting()
    cached = Cached(engine)
    assert [len(cached.search(["a"], k)[0]) for k in (1, 3, 1)] == [1, 3, 1]
    assert len(engine.asked) == 2


def test_the_answer_unused_for_longest_goes_first() -> None:
    engine = Counting()
    cached = Cached(engine, max_entries=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        cached.search([query], 1)
    assert [queries for queries, _ in engine.asked] == [("a",), ("b",), ("c",), ("b",)]


def test_a_batch_larger_than_the_cache_is_still_answered() -> None:
    assert len(Cached(Counting(), max_entries=1).search(["a", "b", "c"], 1)) == 3


def test_an_outage_is_raised_and_never_remembered() -> None:
    engine = Counting()
    cached = Cached(engine)
    engine.down = True
    with pytest.raises(RetrievalError):
        cached.search(["a"], 1)
    engine.down = False
    assert cached.search(["a"], 1)[0][0].doc_id == "a0"


def test_many_threads_get_their_own_answers() -> None:
    cached = Cached(Counting(), max_entries=5)
    queries = [f"q{i % 11}" for i in range(400)]
    with ThreadPoolExecutor(8) as pool:
        assert [found[0][0].text for found in pool.map(lambda query: cached.search([query], 1), queries)] == queries


def test_it_stands_for_its_retriever() -> None:
    assert isinstance(Cached(Counting()), Retriever)
    assert Cached(Counting()).digest == "counting"
