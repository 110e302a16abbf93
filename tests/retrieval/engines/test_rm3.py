"""RM3 by hand, and its limits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leret.config.retriever import RM3Settings
from leret.core.errors import RetrievalError
from leret.core.types import Document, Ranking
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.bm25 import BM25
from leret.retrieval.engines.rm3 import RM3, interpolated, relevance_model

CORPUS = Corpus(
    [
        Document("a", "", "aspirin headache"),
        Document("b", "", "aspirin headache willow willow"),
        Document("c", "", "willow bark"),
        Document("d", "", "river bank"),
    ]
)


def test_the_relevance_model_by_hand() -> None:
    # P(w|R) = sum of P(w|D) P(D); scores 3 and 1, so P(D) is 3/4 and 1/4
    # x: 3/4 x 1/2 + 1/4 x 0, y: 3/4 x 1/2 + 1/4 x 1/4, z: 1/4 x 3/4
    model = relevance_model([{"x": 1, "y": 1}, {"y": 1, "z": 3}], [2, 4], [3.0, 1.0], 10)
    assert model == pytest.approx({"y": 0.4375, "x": 0.375, "z": 0.1875})
    assert list(model) == ["y", "x", "z"]
    # the two likeliest, made to sum to 1
    assert relevance_model([{"x": 1, "y": 1}, {"y": 1, "z": 3}], [2, 4], [3.0, 1.0], 2) == pytest.approx(
        {"y": 0.4375 / 0.8125, "x": 0.375 / 0.8125}
    )
    assert relevance_model([{}], [2], [1.0], 5) == {}


def test_the_interpolation_by_hand() -> None:
    assert interpolated({"x": 2, "y": 1}, {"y": 0.5, "z": 0.5}, 0.4) == pytest.approx(
        {"x": 0.4 * 2 / 3, "y": 0.4 / 3 + 0.3, "z": 0.3}
    )
    assert interpolated({"x": 1}, {}, 0.4) == {"x": 1.0}
    assert interpolated({"x": 1}, {"y": 1.0}, 0.0) == {"y": 1.0}


def test_a_document_without_any_word_of_the_query_is_found_by_the_words_of_the_first_ones() -> None:
    bm25 = BM25.build(CORPUS)
    assert [p.doc_id for p in bm25.search(["aspirin"], 4)[0]] == ["a", "b"]
    found = RM3(bm25).search(["aspirin"], 4)[0]
    assert [p.doc_id for p in found][-1] == "c"
    assert {p.doc_id for p in found} == {"a", "b", "c"}
    assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)


def test_scores_are_the_weighted_sums_of_bm25s_own() -> None:
    bm25 = BM25.build(CORPUS)
    rm3 = RM3(bm25, RM3Settings(original_weight=0.5))
    words = rm3.expanded("aspirin", bm25.search(["aspirin"], 10)[0])
    assert sum(words.values()) == pytest.approx(1.0)
    want: dict[str, float] = {}
    for word, weight in words.items():
        for passage in bm25.search([word], 9)[0]:
            want[passage.doc_id] = want.get(passage.doc_id, 0.0) + weight * passage.score
    got = {p.doc_id: p.score for p in rm3.search(["aspirin"], 9)[0]}
    assert got == pytest.approx(want, rel=1e-5)


def test_common_words_are_never_added() -> None:
    corpus = Corpus(Document(f"d{i}", "", f"word{i} everywhere" + (" rare" if i < 3 else "")) for i in range(200))
    bm25 = BM25.build(corpus)
    words = RM3(bm25).expanded("word1", bm25.search(["word1"], 10)[0])
    assert "rare" in words
    assert "everywhere" not in words


@pytest.mark.parametrize("query", ["", "zzz", "\x00", "\ud800", "the of", "x" * 1_000_000, "^ AND ("])
def test_a_query_without_a_known_word_finds_nothing(query: str) -> None:
    assert RM3(BM25.build(CORPUS)).search([query, "river"], 2)[0] == ()


def test_another_engine_is_refused() -> None:
    class Other:
        digest = "x"

        def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
            return []

    with pytest.raises(RetrievalError, match="an index of kind bm25, and this is Other"):
        RM3(Other())
