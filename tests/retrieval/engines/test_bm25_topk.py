import random

import bm25s
import numpy as np
import pytest

from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.bm25 import BM25

RNG = random.Random(1)
WORDS = [f"w{i}" for i in range(60)]
CORPUS = Corpus(Document(f"d{i}", "", " ".join(RNG.choices(WORDS, k=RNG.randint(1, 12)))) for i in range(300))
QUERIES = [" ".join(RNG.choices(WORDS, k=RNG.randint(1, 6))) for _ in range(40)]


@pytest.mark.parametrize("k", [1, 2, 3, 7, 20])
def test_equal_scores_keep_the_order_of_the_corpus(k):
    corpus = Corpus(Document(f"d{i:02}", "", "same words" if i % 2 else "same other words") for i in range(20))
    expected = [f"d{i:02}" for i in [*range(1, 20, 2), *range(0, 20, 2)]]  # the shorter document is better
    assert [p.doc_id for p in BM25.build(corpus).search(["same"], k)[0]] == expected[:k]


@pytest.mark.parametrize("k", [1, 5, 50, 300])
def test_rankings_equal_sorted_scores_of_bm25s(k, monkeypatch):
    engine, retriever = bm25s.BM25(k1=1.5, b=0.75), BM25.build(CORPUS)
    engine.index(bm25s.tokenize([f". {document.text}" for document in CORPUS.values()], show_progress=False))
    expected = retriever.search(QUERIES, k)
    for query, ranking in zip(QUERIES, expected, strict=True):
        scores = engine.get_scores(query.split())
        order = [i for i in np.lexsort((np.arange(300), -scores)) if scores[i] > 0][:k]
        assert [passage.doc_id for passage in ranking] == [f"d{i}" for i in order]
        assert [passage.score for passage in ranking] == pytest.approx(scores[order].tolist(), rel=1e-6)
    monkeypatch.setattr("leret.retrieval.engines.bm25._CELLS", 12)  # large batches are cut
    assert retriever.search(QUERIES, k) == expected
