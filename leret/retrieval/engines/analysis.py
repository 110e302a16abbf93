"""Analysis of text into words, the same for documents and queries."""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Callable

from leret.config.retriever import AnalyzerSettings
from leret.core.errors import RetrievalError, import_optional

_WORD = re.compile(r"\b\w\w+\b")


def make_analyzer(settings: AnalyzerSettings) -> Callable[[str], list[str]]:
    """Return a thread-safe function from text to lower-case words of at least two characters, without stop words.

    With ``fold_accents`` off the words are those of ``bm25s.tokenize``.
    """
    stop = _stopwords(settings.stopwords, settings.fold_accents)
    fold, stem = settings.fold_accents, _stemmer(settings.stemmer)
    find = _WORD.findall

    def words(text: str) -> list[str]:
        if fold and not text.isascii():
            text = fold_accents(text)
        content = [word for word in find(text.lower()) if word not in stop]
        return content if stem is None else stem(content)

    return words


def fold_accents(text: str) -> str:
    """Remove the marks on letters.

    >>> fold_accents("Beyoncé, ʿAḍud")
    'Beyonce, ʿAdud'
    """
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))


def _stopwords(name: str | None, fold: bool) -> frozenset[str]:
    if name is None:
        return frozenset()
    from bm25s import stopwords

    short = {"english": "EN", "english_plus": "EN_PLUS"}
    words = getattr(stopwords, f"STOPWORDS_{short.get(name, name.upper())}", None)
    if words is None:
        raise RetrievalError(f"retriever.stopwords: bm25s has no list {name!r}; use english, or null for none")
    return frozenset(fold_accents(word) if fold else word for word in words)


def _stemmer(language: str | None) -> Callable[[list[str]], list[str]] | None:
    if language is None:
        return None
    try:
        stem = import_optional("Stemmer", "PyStemmer", "stemming").Stemmer(language).stemWords
    except KeyError as error:
        raise RetrievalError(f"retriever.stemmer: no Snowball language {language!r}; use english or null") from error
    lock = threading.Lock()  # stemmers are stateful

    def stems(words: list[str]) -> list[str]:
        with lock:
            return list(stem(words))

    return stems
