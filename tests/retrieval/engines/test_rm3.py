import pytest

from leret.config.retriever import RM3Settings
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.bm25 import BM25
from leret.retrieval.engines.rm3 import RM3, interpolate, relevance_model

TEXTS = {"a": "aspirin headache", "b": "aspirin headache willow willow", "c": "willow bark", "d": "river bank"}
CORPUS = Corpus(Document(doc_id, "", text) for doc_id, text in TEXTS.items())


def test_the_relevance_model_by_hand():
    # P(w|R) = sum of P(w|D) P(D); scores 3 and 1, so P(D) is 3/4 and 1/4
    # x: 3/4 x 1/2 + 1/4 x 0, y: 3/4 x 1/2 + 1/4 x 1/4, z: 1/4 x 3/4
    feedback = [{"x": 1, "y": 1}, {"y": 1, "z": 3}], [2, 4], [3.0, 1.0]
    model = relevance_model(*feedback, 10)
    assert model == pytest.approx({"y": 0.4375, "x": 0.375, "z": 0.1875})
    assert list(model) == ["y", "x", "z"]
    two = {"y": 0.4375 / 0.8125, "x": 0.375 / 0.8125}  # made to sum to 1
    assert relevance_model(*feedback, 2) == pytest.approx(two)
    assert relevance_model([{}], [2], [1.0], 5) == {}


def test_the_interpolation_by_hand():
    expected = {"x": 0.4 * 2 / 3, "y": 0.4 / 3 + 0.3, "z": 0.3}
    assert interpolate({"x": 2, "y": 1}, {"y": 0.5, "z": 0.5}, 0.4) == pytest.approx(expected)
    assert interpolate({"x": 1}, {}, 0.4) == {"x": 1.0}
    assert interpolate({"x": 1}, {"y": 1.0}, 0.0) == {"y": 1.0}


def test_scores_are_weighted_sums_of_bm25_scores():
    bm25 = BM25.build(CORPUS)
    rm3 = RM3(bm25, RM3Settings(original_weight=0.5))
    words = rm3.expanded("aspirin", bm25.search(["aspirin"], 10)[0])
    assert sum(words.values()) == pytest.approx(1.0)
    expected = dict.fromkeys("abc", 0.0)  # c by a word of the feedback documents alone
    for word, weight in words.items():
        for passage in bm25.search([word], 9)[0]:
            expected[passage.doc_id] += weight * passage.score
    rankings = rm3.search(["aspirin"], 9)[0]
    assert {p.doc_id: p.score for p in rankings} == pytest.approx(expected, rel=1e-5)
    assert sorted(rankings, key=lambda p: -p.score) == list(rankings)
