import shutil

import numpy as np
import pytest

from leret.config.retriever import DenseSettings
from leret.core.errors import RetrievalError
from leret.core.progress import Progress
from leret.retrieval.engines.vector_store import store_class

pytest.importorskip("faiss", reason="faiss is not installed")

VECTORS = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)


def write(name, directory):
    settings = DenseSettings(model="m", store=name)
    store = store_class(settings)
    store.write(iter(np.split(VECTORS, [64, 128])), directory, settings, Progress())
    return store, settings


@pytest.fixture(params=["flat", "hnsw"])
def written(request, tmp_path):
    return write(request.param, tmp_path)


def test_nearest_vectors_have_the_highest_inner_products(written, tmp_path):
    store, settings = written
    loaded = store(tmp_path, settings)
    queries = VECTORS[:20] + np.float32(0.05)
    products = queries @ VECTORS.T
    rows, scores = loaded.nearest(queries, 10)
    assert scores == pytest.approx(np.take_along_axis(products, rows, axis=1), abs=1e-5)
    exact = np.argsort(-products, axis=1)[:, :10]
    shared = [len(set(a) & set(b)) for a, b in zip(exact.tolist(), rows.tolist(), strict=True)]
    assert sum(shared) >= (200 if settings.store == "flat" else 190)
    assert sorted(loaded.nearest(queries[:1], len(loaded))[0][0].tolist()) == list(range(200))


def test_a_missing_store_is_reported(written, tmp_path):
    store, settings = written
    path = tmp_path / store.name
    path.write_bytes(b"") if path.is_file() else shutil.rmtree(path)
    with pytest.raises(RetrievalError, match=r"build (it|the index) again"):
        store(tmp_path, settings)
