"""What colbert-ai is given in place of its encoder; its model is a fake."""

from __future__ import annotations

from typing import Any

import pytest

from leret.core.progress import Silent
from leret.retrieval.engines.colbert import _Encoder

torch = pytest.importorskip("torch")

TEXTS = [" ".join(["word"] * (1 + i % 4)) for i in range(42)]


class Model:
    """A vector a word, which holds the number of the text."""

    def __init__(self) -> None:
        self.n_encoded = 0

    def docFromText(self, texts: list[str], bsize: int, keep_dims: str) -> tuple[Any, list[int]]:  # noqa: N802
        counts = [len(text.split()) for text in texts]
        rows = [float(self.n_encoded + i) for i, n in enumerate(counts) for _ in range(n)]
        self.n_encoded += len(texts)
        return torch.tensor(rows)[:, None], counts


def encoder(n_documents: int) -> tuple[_Encoder, Model]:
    model = Model()
    return _Encoder(model, 1, n_documents, Silent()), model


@pytest.mark.parametrize("size", [42, 25, 1])
def test_a_sample_of_all_documents_is_all_that_is_encoded(size: int) -> None:
    made, model = encoder(len(TEXTS))
    vectors, counts = made.encode_passages(TEXTS)
    chunks = [made.encode_passages(TEXTS[start : start + size]) for start in range(0, len(TEXTS), size)]
    assert model.n_encoded == len(TEXTS)
    assert torch.equal(torch.cat([chunk for chunk, _ in chunks]), vectors)
    assert [n for _, own in chunks for n in own] == counts
    assert [len(chunk) for chunk, _ in chunks] == [sum(own) for _, own in chunks]


def test_after_a_sample_of_some_documents_all_are_encoded() -> None:
    made, model = encoder(len(TEXTS))
    made.encode_passages(TEXTS[::2])
    vectors, counts = made.encode_passages(TEXTS[:25])
    assert model.n_encoded == 21 + 25
    assert vectors[:, 0].unique().tolist() == list(range(21, 46))
    assert counts == [len(text.split()) for text in TEXTS[:25]]


def test_a_build_that_goes_on_has_no_sample() -> None:
    made, model = encoder(len(TEXTS))
    made.encode_passages(TEXTS[25:])
    assert model.n_encoded == 17
