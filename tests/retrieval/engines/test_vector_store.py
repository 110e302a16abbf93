"""Where vectors are kept: each store against all inner products."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leret.config.retriever import DenseSettings
from leret.core.errors import RetrievalError
from leret.core.progress import Silent
from leret.retrieval.engines.vector_store import STORES

pytest.importorskip("faiss", reason="faiss is not installed")


@pytest.fixture(params=["flat", "hnsw", "chroma"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Store, settings and 200 unit vectors of a store that was written from three parts."""
    if request.param == "chroma":
        pytest.importorskip("chromadb", reason="chromadb is not installed")
    vectors = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    store, settings = STORES[request.param], DenseSettings(model="m", store=request.param)
    store.write(iter(np.split(vectors, [64, 128])), tmp_path, settings, Silent())
    return store, settings, vectors


def test_the_nearest_are_those_of_all_inner_products(written: Any, tmp_path: Path) -> None:
    store, settings, vectors = written
    opened = store.open(tmp_path, settings)
    queries = vectors[:20] + np.float32(0.05)
    products = queries @ vectors.T
    rows, scores = opened.nearest(queries, 10)
    assert len(opened) == 200
    assert scores == pytest.approx(np.take_along_axis(products, rows, axis=1), abs=1e-5)
    exact = np.argsort(-products, axis=1)[:, :10]
    shared = [len(set(a) & set(b)) for a, b in zip(exact.tolist(), rows.tolist(), strict=True)]
    assert sum(shared) >= (200 if settings.store == "flat" else 190)
    assert sorted(opened.nearest(queries[:1], 200)[0][0].tolist()) == list(range(200))


def test_a_store_that_is_gone_is_said(written: Any, tmp_path: Path) -> None:
    store, settings, _ = written
    path = tmp_path / store.name
    shutil.rmtree(path) if path.is_dir() else path.write_bytes(b"")
    if store.name == "chroma":
        path.mkdir()
    with pytest.raises(RetrievalError, match=r"build (it|the index) again"):
        store.open(tmp_path, settings)
