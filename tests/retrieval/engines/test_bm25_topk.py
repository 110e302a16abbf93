"""The best documents of a query: as a full sort of bm25s's scores has them, ties in the order of the corpus."""

from __future__ import annotations

import random

import bm25s
import numpy as np
import pytest

from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.bm25 import BM25


@pytest.mark.parametrize("k", [1, 2, 3, 7, 20])
def test_equal_scores_stand_in_the_order_of_the_corpus(k: int) -> None:
    corpus = Corpus(Document(f"d{i:02}", "", "same words" if i % 2 else "same other words") for i in range(20))
    expected = [f"d{i:02}" for i in [*range(1, 20, 2), *range(0, 20, 2)]]  # the shorter document is better
    assert [p.doc_id for p in BM25.build(corpus).search(["same"], k)[0]] == expected[:k]


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
