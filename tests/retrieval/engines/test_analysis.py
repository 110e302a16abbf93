"""Words of documents and queries."""

from __future__ import annotations

import bm25s
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leret.config.retriever import BM25Settings
from leret.core.errors import RetrievalError
from leret.retrieval.engines.analysis import make_analyzer


@given(st.text(st.characters(codec=None)))
def test_with_accents_kept_the_words_are_those_of_bm25s(text: str) -> None:
    (expected,) = bm25s.tokenize([text], stopwords="english", return_ids=False, show_progress=False)
    assert make_analyzer(BM25Settings(fold_accents=False))(text) == expected


def test_accents_are_folded_in_words_and_stop_words_alike() -> None:
    assert make_analyzer(BM25Settings())("Beyoncé sang at the Café") == ["beyonce", "sang", "cafe"]
    assert make_analyzer(BM25Settings(stopwords="german"))("für Müller") == ["muller"]


def test_an_unknown_list_of_stop_words_is_refused() -> None:
    with pytest.raises(RetrievalError, match="no list named 'klingon'; use english"):
        make_analyzer(BM25Settings(stopwords="klingon"))


def test_stems_take_the_place_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stemmer:
        def __init__(self, language: str) -> None:
            if language != "english":
                raise KeyError(language)

        def stemWords(self, words: list[str]) -> list[str]:  # noqa: N802
            return [word.removesuffix("s") for word in words]

    import sys
    import types

    module = types.ModuleType("Stemmer")
    module.Stemmer = Stemmer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "Stemmer", module)
    assert make_analyzer(BM25Settings(stemmer="english"))("cats and dogs") == ["cat", "dog"]
    with pytest.raises(RetrievalError, match="no Snowball language"):
        make_analyzer(BM25Settings(stemmer="klingon"))
