"""BM25: scores, order, ties, odd queries, threads."""

from __future__ import annotations

import math
import random

import bm25s
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
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


@pytest.mark.parametrize("k", [1, 2, 3, 7, 20])
def test_equal_scores_stand_in_the_order_of_the_corpus(k: int) -> None:
    corpus = Corpus(Document(f"d{i:02}", "", "same words" if i % 2 else "same other words") for i in range(20))
    expected = [f"d{i:02}" for i in [*range(1, 20, 2), *range(0, 20, 2)]]  # the shorter document is better
    assert _ids(BM25.build(corpus), "same", k) == expected[:k]


def _world(n: int, seed: int) -> tuple[Corpus, list[str]]:
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(60)]
    corpus = Corpus(Document(f"d{i}", "", " ".join(rng.choices(words, k=rng.randint(1, 12)))) for i in range(n))
    return corpus, [" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(40)]


@pytest.mark.parametrize("k", [1, 5, 50, 300])
def test_rankings_are_those_of_a_full_sort_of_the_scores_of_bm25s(k: int) -> None:
    corpus, queries = _world(300, 1)
    ids = list(corpus)
    tokens = bm25s.tokenize([f". {document.text}" for document in corpus.values()], show_progress=False)
    engine = bm25s.BM25(k1=1.5, b=0.75)
    engine.index(tokens, show_progress=False)
    for query, ranking in zip(queries, BM25.build(corpus).search(queries, k), strict=True):
        scores = engine.get_scores(query.split())
        order = [i for i in np.lexsort((np.arange(300), -scores)) if scores[i] > 0][:k]
        assert [passage.doc_id for passage in ranking] == [ids[i] for i in order]
        assert [passage.score for passage in ranking] == pytest.approx(scores[order].tolist(), rel=1e-6)


def test_large_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, queries = _world(50, 3)
    retriever = BM25.build(corpus)
    whole = retriever.search(queries, 5)
    monkeypatch.setattr("leret.retrieval.engines.bm25._CELLS", 12)
    assert retriever.search(queries, 5) == whole


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(queries=st.lists(st.text(st.characters(codec=None)), max_size=5), k=st.integers(1, 8))
def test_any_text_is_a_query(animals: BM25, queries: list[str], k: int) -> None:
    rankings = animals.search(queries, k)
    assert len(rankings) == len(queries)
    for ranking in rankings:
        scores = [passage.score for passage in ranking]
        assert len(ranking) <= k
        assert scores == sorted(scores, reverse=True)
        assert all(score > 0 for score in scores)
        assert len({passage.doc_id for passage in ranking}) == len(ranking)


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
