import pytest

from tests.retrieval.engines.test_vector_store import (  # noqa: F401
    test_a_missing_store_is_reported,
    test_nearest_vectors_have_the_highest_inner_products,
    write,
)

pytest.importorskip("chromadb", reason="chromadb is not installed")


@pytest.fixture
def written(tmp_path):
    return write("chroma", tmp_path)
