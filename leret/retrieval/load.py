"""The engine that a recipe names."""

from __future__ import annotations

from pathlib import Path

from leret.config import RetrieverSettings
from leret.retrieval.base import Retriever
from leret.retrieval.documents import Documents

__all__ = ["load_retriever"]


def load_retriever(settings: RetrieverSettings, corpus: Documents, cache: Path) -> Retriever:
    """Open the index over a corpus; build it where it is missing.

    Args:
        settings: of the recipe.
        corpus: what is searched.
        cache: where the index is kept when the settings name no directory.

    Raises:
        RetrievalError: the index cannot be built or opened, or is of another corpus.
    """
    from leret.retrieval.bm25 import open_or_build

    directory = Path(settings.index) if settings.index else cache / settings.kind
    return open_or_build(
        corpus,
        directory,
        k1=settings.k1,
        b=settings.b,
        stopwords=settings.stopwords,
        fold_accents=settings.fold_accents,
    )
