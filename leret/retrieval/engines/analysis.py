"""How text becomes words: the same for a document and for a query."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from leret.core.errors import MissingDependency, RetrievalError

_WORD = re.compile(r"\b\w\w+\b")


@dataclass(frozen=True, slots=True)
class WordSettings:
    """What decides the words of a text.

    Attributes:
        stopwords: a list of bm25s by its name (``english`` has 33 words); None keeps every word.
        stemmer: a Snowball language for PyStemmer (``english``); None keeps words whole.
        fold_accents: ``Beyoncé`` and ``Beyonce`` are one word.
    """

    stopwords: str | None = "english"
    stemmer: str | None = None
    fold_accents: bool = True


def tokenizer(settings: WordSettings) -> Callable[[str], list[str]]:
    """A function from text to words: lower case, of two letters or digits at least, stop words left out.

    With ``fold_accents`` off these are the words of ``bm25s.tokenize``. Thread-safe unless it stems: a Snowball
    stemmer keeps a state, so give every thread its own then.

    Raises:
        RetrievalError: the stop words or the stemmer have an unknown name.
        MissingDependency: a stemmer is named, and PyStemmer is absent.
    """
    stop = _stopwords(settings.stopwords, settings.fold_accents)
    fold = fold_accents if settings.fold_accents else None
    stem = _stemmer(settings.stemmer)

    def words(text: str) -> list[str]:
        if fold is not None:
            text = fold(text)
        kept = [word for word in _WORD.findall(text.lower()) if word not in stop]
        return stem(kept) if stem is not None else kept

    return words


def fold_accents(text: str) -> str:
    """Text without the marks on its letters.

    >>> fold_accents("Beyoncé, ʿAḍud")
    'Beyonce, ʿAdud'
    """
    if text.isascii():
        return text
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))


def _stopwords(name: str | None, fold: bool) -> frozenset[str]:
    if name is None:
        return frozenset()
    from bm25s import stopwords

    short = {"english": "EN", "english_plus": "EN_PLUS"}
    words = getattr(stopwords, f"STOPWORDS_{short.get(name, name.upper())}", None)
    if words is None:
        raise RetrievalError(f"retriever.stopwords: bm25s has no list named {name!r}; use english, or null for none")
    return frozenset(fold_accents(word) if fold else word for word in words)


def _stemmer(language: str | None) -> Callable[[list[str]], list[str]] | None:
    if language is None:
        return None
    try:
        import Stemmer
    except ImportError as error:
        raise MissingDependency("PyStemmer", "stemming") from error
    try:
        stem: Callable[[list[str]], list[str]] = Stemmer.Stemmer(language).stemWords
    except KeyError as error:
        raise RetrievalError(f"retriever.stemmer: {language!r} is no Snowball language; use english or null") from error
    return stem
