"""BM25: scores, order, ties, odd queries, threads."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leret.config.retriever import BM25Settings
from leret.core.errors import RetrievalError
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.base import Retriever
from leret.retrieval.engines.analysis import make_analyzer
from leret.retrieval.engines.bm25 import BM25

_ANIMALS = Corpus(
    [
        Document("d1", "Cat", "cat sat mat"),
        Document("d2", "Dog", "dog sat"),
        Document("d3", "Bird", "bird flew far away"),
        Document("d4", "", "Müller's café"),
    ]
)


@pytest.fixture(scope="module")
def animals() -> BM25:
    return BM25.build(_ANIMALS)


def _ids(retriever: BM25, query: str, k: int = 10) -> list[str]:
    return [passage.doc_id for passage in retriever.search([query], k)[0]]


def test_a_score_is_the_formula_by_hand(animals: BM25) -> None:
    # words of the documents: cat cat sat mat | dog dog sat | bird bird flew far away | muller cafe: mean length 14 / 4
    # query "cat": idf = ln(1 + (4 - 1 + .5) / (1 + .5)); tf = 2 / (2 + 1.5 * (1 - .75 + .75 * 4 / 3.5))
    idf = math.log(1 + 3.5 / 1.5)
    expected = idf * 2 / (2 + 1.5 * (0.25 + 0.75 * 4 / 3.5))
    ((passage,),) = animals.search(["cat"], 3)
    assert passage.score == pytest.approx(expected, rel=1e-6)
    assert (passage.doc_id, passage.title, passage.text) == ("d1", "Cat", "cat sat mat")


@pytest.mark.parametrize("query", ["", " ", "the of and", "!?", "unheard", "\x00\x1f", "\ud800", "a"], ids=repr)
def test_a_query_without_a_known_word_has_an_empty_ranking(animals: BM25, query: str) -> None:
    assert animals.search([query, "cat"], 2)[0] == ()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(st.characters(codec=None)), max_size=6), st.text())
def test_any_text_is_a_document_or_the_corpus_is_refused(texts: list[str], query: str) -> None:
    corpus = Corpus(Document(str(i), "", text) for i, text in enumerate(texts))
    if not any(make_analyzer(BM25Settings())(text) for text in texts):
        with pytest.raises(RetrievalError, match="has a word that can be indexed"):
            BM25.build(corpus)
        return
    assert all(passage.text in texts for passage in BM25.build(corpus).search([query], 3)[0])


def test_it_is_a_retriever_named_by_settings_and_corpus(animals: BM25) -> None:
    assert isinstance(animals, Retriever)
    other = Corpus([*_ANIMALS.values(), Document("d5", "", "cow")])
    digests = [
        animals.digest,
        BM25.build(_ANIMALS, k1=1.2).digest,
        BM25.build(_ANIMALS, stopwords=None).digest,
        BM25.build(_ANIMALS, fold_accents=False).digest,
        BM25.build(other).digest,
    ]
    assert len(set(digests)) == 5
    assert BM25.build(_ANIMALS).digest == animals.digest
