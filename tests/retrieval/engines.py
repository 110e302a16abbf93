"""Every engine, small, for tests of what they have in common."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leret.config.retriever import RetrieverSettings
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from tests.retrieval.models import colbert_checkpoint, minilm

COLBERT = pytest.param("colbert", marks=[pytest.mark.slow, pytest.mark.timeout(900)])
"""Its first use compiles C++ for a minute or three."""

KINDS = ("bm25", "tantivy", "dense", "hnsw", "chroma", COLBERT, "hybrid")

_NEEDS = {
    "tantivy": "tantivy",
    "dense": "faiss",
    "hnsw": "faiss",
    "chroma": "chromadb",
    "colbert": "colbert",
    "hybrid": "faiss",
}

ANIMALS = Corpus(
    [
        Document("cat", "Cat", "The cat sat on the mat and purred."),
        Document("dog", "Dog", "A dog barks at the postman."),
        Document("bird", "Bird", "Birds fly south when winter comes."),
        Document("café", "", "Müller's café serves strudel \ud800 and coffee."),
        Document("empty", "Nothing", ""),
        *(Document(f"t{i}", f"Town {i}", f"Town {i} is a town by the river number {i % 7}.") for i in range(60)),
    ]
)


def settings(kind: str, folder: Path, **more: Any) -> RetrieverSettings:
    """Of a small index of one kind; skips where its packages are absent."""
    needed = _NEEDS.get(kind)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    if kind in {"bm25", "tantivy"}:
        values: dict[str, Any] = {"kind": kind}
    elif kind == "colbert":
        checkpoint = folder / "checkpoint"
        if not checkpoint.exists():
            colbert_checkpoint(checkpoint)
        values = {"kind": "colbert", "checkpoint": str(checkpoint)}
    elif kind == "hybrid":
        values = {"kind": "hybrid", "engines": [{"kind": "bm25"}, _dense("flat")]}
    else:
        values = _dense({"dense": "flat"}.get(kind, kind))
    return RetrieverSettings.model_validate({**values, **more})


def _dense(store: str) -> dict[str, Any]:
    return {"kind": "dense", "model": str(minilm()), "store": store}


Build = Callable[[str], Path]
