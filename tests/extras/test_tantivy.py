import math

import pytest

from leret.core.errors import RetrievalError
from leret.core.progress import Progress
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.extras.tantivy import TantivyIndex, TantivySettings
from leret.retrieval.index.documents import DocumentTable

pytest.importorskip("tantivy", reason="tantivy is not installed")

ENGINE = TantivyIndex(TantivySettings())


def corpus(*texts):
    return Corpus(Document(f"d{i:03}", "", text) for i, text in enumerate(texts))


def build(documents, directory):
    ENGINE.write(documents, directory, Progress())
    return ENGINE.open(directory, DocumentTable.of(documents))


def test_scores_follow_the_formula_and_repeated_words_count(tmp_path):
    # all documents are as long: tf = 1 x 2.2 / (1 + 1.2); idf = ln(1 + (3 - 1 + .5) / (1 + .5))
    engine = build(corpus("cat mat", "dog mat", "bird mat"), tmp_path)
    ((once,), (thrice,)) = engine.search(["cat", "cat cat cat"], 3)
    expected = math.log(1 + 2.5 / 1.5)
    assert (once.score, thrice.score) == pytest.approx((expected, 3 * expected), rel=1e-5)


@pytest.mark.parametrize("in_order", [True, False])
def test_equal_scores_keep_the_order_of_the_corpus(tmp_path, in_order):
    engine = build(corpus(*["same words"] * 300), tmp_path)
    engine._in_order = in_order  # as of an index of several segments
    for k in (1, 7, 300):
        assert [p.doc_id for p in engine.search(["same"], k)[0]] == [f"d{i:03}" for i in range(k)]


def test_a_corpus_without_words_is_refused(tmp_path):
    with pytest.raises(RetrievalError, match="contains a word to index"):
        build(corpus("?!"), tmp_path)
