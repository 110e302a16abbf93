import pickle
import shutil

import numpy as np
import pytest

from leret.config.retriever import DenseSettings
from leret.core.errors import RetrievalError
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines import dense
from leret.retrieval.engines.dense import Encoder
from leret.retrieval.load import load_retriever, open_index
from tests.retrieval.small import minilm

pytest.importorskip("faiss", reason="faiss is not installed")

TOWNS = Corpus(
    Document(f"t{i}", f"Town {i}", f"It has {i * 37} people, a mill and a market on day {i % 7}.") for i in range(45)
)
QUERIES = ["which town has a market on day 3", "a mill", "town with 370 people", "Town 12"]


def settings(index, **more):
    return DenseSettings(**{"index": str(index), "model": str(minilm()), **more})


def build(index, corpus=TOWNS, **more):
    return load_retriever(settings(index, **more), corpus, index.parent)


def encoder(**more):
    return Encoder(minilm(), DenseSettings(**{"model": "m", "device": "cpu", **more}))


def test_rankings_equal_sorted_inner_products(tmp_path):
    build(tmp_path / "index")
    texts = [f"{document.title}. {document.text}" for document in TOWNS.values()]
    scores = encoder().encode(QUERIES) @ encoder().encode(texts).T
    for row, ranking in zip(scores, open_index(tmp_path / "index").search(QUERIES, 10), strict=True):
        best = np.sort(row)[::-1][:10].tolist()
        assert [passage.score for passage in ranking] == pytest.approx(best, abs=1e-5)
        assert [row[int(passage.doc_id[1:])] for passage in ranking] == pytest.approx(best, abs=1e-5)


def test_prefixes_and_separators_reach_the_encoder(tmp_path, monkeypatch):
    def encode(self, texts):
        seen.extend(texts)
        return real(self, texts)

    seen, real = [], Encoder.encode
    monkeypatch.setattr(Encoder, "encode", encode)
    few = Corpus([Document("a", "Title", "Text"), Document("b", "", "Bare")])
    prefixes = {"query_prefix": "query: ", "document_prefix": "passage: "}
    built = build(tmp_path / "x", few, separator=" | ", normalize=False, **prefixes)
    loaded = open_index(tmp_path / "x")
    loaded.search(["what"], 1)
    assert (seen, loaded.digest) == (["passage: Title | Text", "passage: Bare", "query: what"], built.digest)


def test_settings_that_change_rankings_change_the_digest(tmp_path):
    changes = [{}, {"query_prefix": "query: "}, {"normalize": False}, {"store": "hnsw"}]
    assert len({dense.DenseIndex.of(settings(tmp_path, **change)).digest("c") for change in changes}) == 4


def test_a_stopped_build_resumes_and_encodes_nothing_twice(tmp_path, monkeypatch):
    def encode(self, texts):
        counts.append(len(texts))
        if len(counts) == 4:
            raise KeyboardInterrupt
        return real(self, texts)

    def stopped(*_):
        raise KeyboardInterrupt

    counts, real, index = [], Encoder.encode, tmp_path / "index"
    monkeypatch.setattr(dense, "_SHARD", 10)
    monkeypatch.setattr(Encoder, "encode", encode)
    with monkeypatch.context() as patched:
        patched.setattr("leret.retrieval.index.manifest.write_manifest", stopped)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                build(index)
    build(index)
    assert counts == [10, 10, 10, 10, 10, 5]  # the fourth of five files was encoded again
    assert not list(index.glob("*shards*"))
    assert build(tmp_path / "whole").search(QUERIES, 5) == open_index(index).search(QUERIES, 5)


def test_another_model_is_refused(tmp_path):
    model, index = shutil.copytree(minilm(), tmp_path / "model"), tmp_path / "index"
    build(index, model=str(model))
    with open(model / "vocab.txt", "a", encoding="utf-8") as file:
        file.write("another\n")
    with pytest.raises(RetrievalError, match="has changed; restore it, or build the index again"):
        open_index(index)
    shutil.rmtree(model)
    with pytest.raises(RetrievalError, match=r"model directory .* is missing"):
        open_index(index)


def test_pickled_weights_are_not_read(tmp_path):
    aside = shutil.ignore_patterns("*.safetensors", "onnx", "openvino")
    model = shutil.copytree(minilm(), tmp_path / "model", ignore=aside)
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": print}))
    with pytest.raises(RetrievalError, match=r"cannot be opened as a sentence-transformers model \(UnpicklingError"):
        Encoder(model, DenseSettings(model="m", device="cpu"))


def test_settings_beyond_the_model_are_refused_before_a_build():
    with pytest.raises(RetrievalError, match=r"change retriever.device: gpu"):
        encoder(device="gpu")
    with pytest.raises(RetrievalError, match=r"max_length: .* cannot encode 513 tokens .*; set at most 256"):
        encoder(max_length=513)
    assert encoder(max_length=512).encode(["word " * 2000]).shape == (1, 384)
