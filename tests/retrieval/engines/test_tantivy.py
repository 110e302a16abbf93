"""BM25 of tantivy: scores by hand, ties in the order of the corpus, and an index that does not fit."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from leret.config.retriever import TantivySettings
from leret.core.errors import RetrievalError
from leret.core.progress import Silent
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.tantivy import Tantivy, TantivyIndex
from leret.retrieval.index.documents import InMemoryDocuments

pytest.importorskip("tantivy", reason="tantivy is not installed")


def build(corpus: Corpus, directory: Path) -> Tantivy:
    engine = TantivyIndex(TantivySettings())
    engine.write(corpus, directory, Silent())
    return engine.open(directory, InMemoryDocuments(corpus))  # type: ignore[arg-type]


def test_a_score_is_the_formula_by_hand_and_a_word_counts_as_often_as_it_is_said(tmp_path: Path) -> None:
    corpus = Corpus([Document("a", "", "cat mat"), Document("b", "", "dog mat"), Document("c", "", "bird mat")])
    engine = build(corpus, tmp_path)
    # all documents are as long: tf = 1 x 2.2 / (1 + 1.2); idf = ln(1 + (3 - 1 + .5) / (1 + .5))
    ((once,), (thrice,)) = engine.search(["cat", "cat cat cat"], 3)
    assert once.score == pytest.approx(math.log(1 + 2.5 / 1.5), rel=1e-5)
    assert thrice.score == pytest.approx(3 * once.score, rel=1e-5)


@pytest.mark.parametrize("in_order", [True, False])
def test_equal_scores_stand_in_the_order_of_the_corpus(tmp_path: Path, in_order: bool) -> None:
    engine = build(Corpus(Document(f"d{i:03}", "", "same words") for i in range(300)), tmp_path)
    engine._in_order = in_order  # as of an index of several segments
    for k in (1, 7, 300):
        assert [p.doc_id for p in engine.search(["same"], k)[0]] == [f"d{i:03}" for i in range(k)]


def test_an_index_without_words_or_of_other_documents_is_refused(tmp_path: Path) -> None:
    corpus = Corpus([Document("a", "", "cat")])
    engine = TantivyIndex(TantivySettings())
    with pytest.raises(RetrievalError, match="has a word that can be indexed"):
        engine.write(Corpus([Document("a", "", "?!")]), tmp_path, Silent())
    shutil.rmtree(tmp_path / "tantivy")
    engine.write(corpus, tmp_path, Silent())
    with pytest.raises(RetrievalError, match="tantivy has 1 documents, and 0 are stored"):
        engine.open(tmp_path, InMemoryDocuments(Corpus([])))  # type: ignore[arg-type]
