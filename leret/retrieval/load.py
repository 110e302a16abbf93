"""The engine that a recipe names."""

from __future__ import annotations

from pathlib import Path

from leret.config import RetrieverSettings
from leret.errors import RetrievalError
from leret.retrieval.base import Retriever
from leret.retrieval.documents import Documents

__all__ = ["load_retriever"]


def load_retriever(settings: RetrieverSettings, corpus: Documents | None, cache: Path) -> Retriever:
    """Open the index over a corpus; build it where it is missing.

    Args:
        settings: of the recipe.
        corpus: what is searched; None where an engine behind HTTP has its own.
        cache: where the index is kept when the settings name no directory.

    Raises:
        RetrievalError: the index cannot be built or opened, or is of another corpus.
    """
    from leret.retrieval.kept import keep_answers

    return keep_answers(_engine(settings, corpus, cache), settings.kind, settings.answers)


def _engine(settings: RetrieverSettings, corpus: Documents | None, cache: Path) -> Retriever:
    from leret.retrieval.live import is_live, load_live

    if is_live(settings.kind):
        return load_live(settings, corpus)
    if corpus is None:
        raise RetrievalError(f"retriever.kind {settings.kind} searches a corpus; name it with data.corpus")
    from leret.retrieval.bm25 import open_or_build

    directory = Path(settings.index) if settings.index else cache / "bm25"
    bm25 = open_or_build(
        corpus,
        directory,
        k1=settings.k1,
        b=settings.b,
        stopwords=settings.stopwords,
        fold_accents=settings.fold_accents,
    )
    if settings.kind == "rm3":
        from leret.retrieval.rm3 import RM3

        return RM3(bm25, settings.rm3)
    return bm25
