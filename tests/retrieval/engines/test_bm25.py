import math
import random
import sys
from types import SimpleNamespace

import bm25s
import dspy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leret.config.retriever import BM25Settings
from leret.core.errors import RetrievalError
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.bm25 import BM25, make_analyzer

TEXTS = {"Cat": "cat sat mat", "Dog": "dog sat", "Bird": "bird flew far away", "": "Müller's café"}
ANIMALS = Corpus(Document(title, title, text) for title, text in TEXTS.items())
RNG = random.Random(1)
WORDS = [f"w{i}" for i in range(20)]
CORPUS = Corpus(Document(f"d{i}", "", " ".join(RNG.choices(WORDS, k=RNG.randint(1, 6)))) for i in range(300))
QUERIES = [" ".join(RNG.choices(WORDS, k=RNG.randint(1, 6))) for _ in range(40)]


def test_scores_follow_the_formula():
    # words of the documents: cat cat sat mat | dog dog sat | bird bird flew far away | muller cafe: mean length 14 / 4
    # query "cat": idf = ln(1 + (4 - 1 + .5) / (1 + .5)); tf = 2 / (2 + 1.5 * (1 - .75 + .75 * 4 / 3.5))
    expected = math.log(1 + 3.5 / 1.5) * 2 / (2 + 1.5 * (0.25 + 0.75 * 4 / 3.5))
    [[passage]] = BM25.build(ANIMALS).search(["cat"], 3)
    assert passage[:4] == ("Cat", "Cat", "cat sat mat", pytest.approx(expected, rel=1e-6))


def test_any_text_can_be_indexed_unless_all_lack_words():
    silent = ["", "\x00", "\ud800", "the", "?!", "\u2028 \u202e"]
    texts = [*silent, "Müller\u2028café", "x" * 100_000, "".join(map(chr, range(1, 2000)))]
    corpus = Corpus(Document(str(i), "", text) for i, text in enumerate(texts))
    [[passage]] = BM25.build(corpus).search(["cafe \ud800"], 3)
    assert passage.text == "Müller\u2028café"
    with pytest.raises(RetrievalError, match="contains a word to index"):
        BM25.build(Corpus(Document(str(i), "", text) for i, text in enumerate(silent)))


@given(st.text(st.characters(codec=None)))
def test_unfolded_words_equal_those_of_bm25s(text):
    (expected,) = bm25s.tokenize([text], stopwords="english", return_ids=False, show_progress=False)
    assert make_analyzer(BM25Settings(fold_accents=False))(text) == expected


def test_words_are_folded_stemmed_and_stopped_in_known_languages(monkeypatch):
    assert make_analyzer(BM25Settings())("Beyoncé sang at the Café") == ["beyonce", "sang", "cafe"]
    assert make_analyzer(BM25Settings(stopwords="german"))("für Müller") == ["muller"]

    stemmers = {"english": SimpleNamespace(stemWords=lambda words: [word.removesuffix("s") for word in words])}
    monkeypatch.setitem(sys.modules, "Stemmer", SimpleNamespace(Stemmer=stemmers.__getitem__))
    assert make_analyzer(BM25Settings(stemmer="english"))("cats and dogs") == ["cat", "dog"]

    for key, says in (("stemmer", "unknown language 'klingon'"), ("stopwords", "no list 'klingon'")):
        with pytest.raises(RetrievalError, match=says):
            make_analyzer(BM25Settings(**{key: "klingon"}))


def test_dspy_retrieve_uses_a_retriever():
    documents = [Document("d1", "Alpha", "alpha leads to beta"), Document("d2", "", "gamma")]
    rm = BM25.build(Corpus(documents))
    with dspy.context(rm=rm):
        assert dspy.Retrieve(k=1)("alpha").passages == ["Alpha | alpha leads to beta"]
    [row] = rm("gamma", k=1)
    assert (row.long_text, row.pid) == ("gamma", "d2")


@pytest.mark.parametrize("k", [5, 300])
def test_rankings_equal_sorted_scores_of_bm25s(k, monkeypatch):
    engine, retriever = bm25s.BM25(k1=1.5, b=0.75), BM25.build(CORPUS)
    engine.index(bm25s.tokenize([f". {document.text}" for document in CORPUS.values()], show_progress=False))
    expected = retriever.search(QUERIES, k)
    for query, ranking in zip(QUERIES, expected, strict=True):
        scores = engine.get_scores(query.split())
        # equal scores keep the order of the corpus
        order = [i for i in np.lexsort((np.arange(300), -scores)) if scores[i] > 0][:k]
        assert [passage.doc_id for passage in ranking] == [f"d{i}" for i in order]
        assert [passage.score for passage in ranking] == pytest.approx(scores[order].tolist(), rel=1e-6)
    monkeypatch.setattr("leret.retrieval.engines.bm25._CELLS", 12)  # large batches are cut
    assert retriever.search(QUERIES, k) == expected
