"""The dense engine with real weights: exact against numpy, prefixes, resuming, HNSW's recall, a model that changed."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leret.config.retriever import DenseSettings
from leret.core.errors import RetrievalError
from leret.core.files import is_incomplete
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines import dense
from leret.retrieval.engines.dense import Encoder
from leret.retrieval.load import load_retriever, open_index
from tests.retrieval.small import minilm

pytest.importorskip("faiss", reason="faiss is not installed")

TOWNS = Corpus(
    Document(f"t{i}", f"Town {i}", f"It has {i * 37} people, a mill and a market on day {i % 7}.") for i in range(96)
)
QUERIES = ["which town has a market on day 3", "a mill", "town with 370 people", "Town 12"]


def settings(index: Path, **more: Any) -> DenseSettings:
    return DenseSettings(index=str(index), model=str(minilm()), **more)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense") / "flat"
    load_retriever(settings(directory), TOWNS, directory.parent)
    return directory


def stopped(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def encoder(**more: Any) -> Encoder:
    return Encoder(minilm(), DenseSettings(model="m", **{"device": "cpu", **more}))


def test_rankings_are_those_of_all_inner_products(flat: Path) -> None:
    texts = [f"{document.title}. {document.text}" for document in TOWNS.values()]
    scores = encoder().encode(QUERIES) @ encoder().encode(texts).T
    ids = list(TOWNS)
    for row, ranking in zip(scores, open_index(flat).search(QUERIES, 10), strict=True):
        best = np.argsort(-row, kind="stable")[:10]
        assert [found.score for found in ranking] == pytest.approx(row[best].tolist(), abs=1e-5)
        clear = [i for i in range(10) if np.sum(np.abs(row - row[best[i]]) < 2e-5) == 1]  # no twin beside it
        assert [ranking[i].doc_id for i in clear] == [ids[best[i]] for i in clear]


def test_prefixes_separator_and_normalization_are_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = Encoder.encode

    def spied(self: Encoder, texts: Sequence[str]) -> Any:
        seen.extend(texts)
        return real(self, texts)

    monkeypatch.setattr(Encoder, "encode", spied)
    few = Corpus([Document("a", "Title", "Text"), Document("b", "", "Bare")])
    made = load_retriever(
        settings(tmp_path / "x", query_prefix="query: ", document_prefix="passage: ", separator=" | ", normalize=False),
        few,
        tmp_path,
    )
    open_index(tmp_path / "x").search(["what"], 1)
    assert seen == ["passage: Title | Text", "passage: Bare", "query: what"]
    assert open_index(tmp_path / "x").digest == made.digest


@pytest.mark.parametrize("change", [{"query_prefix": "query: "}, {"normalize": False}, {"store": "hnsw"}])
def test_whatever_changes_rankings_changes_the_digest(flat: Path, change: dict[str, Any]) -> None:
    engine = dense.DenseIndex.of
    assert engine(settings(flat)).digest("c") != engine(settings(flat, **change)).digest("c")


def test_a_stopped_build_goes_on_after_the_last_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_SHARD", 10)
    counts: list[int] = []
    real = Encoder.encode
    allowed = [3]

    def failing(self: Encoder, texts: Sequence[str]) -> Any:
        if len(texts) > 1 and len(counts) >= allowed[0]:
            raise KeyboardInterrupt
        counts.append(len(texts))
        return real(self, texts)

    monkeypatch.setattr(Encoder, "encode", failing)
    wanted = settings(tmp_path / "index")
    few = Corpus(list(TOWNS.values())[:45])
    with pytest.raises(KeyboardInterrupt):
        load_retriever(wanted, few, tmp_path)
    assert is_incomplete(tmp_path / "index")
    with pytest.raises(RetrievalError, match="was stopped before its end"):
        open_index(tmp_path / "index")
    counts.clear()
    allowed[0] = 100
    load_retriever(wanted, few, tmp_path)
    assert counts == [10, 5]  # of 5 files, the last two
    load_retriever(settings(tmp_path / "whole"), few, tmp_path)
    assert open_index(tmp_path / "index").search(QUERIES, 5) == open_index(tmp_path / "whole").search(QUERIES, 5)


@pytest.mark.parametrize("store", ["flat", "chroma"])
def test_a_build_that_stops_after_its_vectors_encodes_nothing_again(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store == "chroma":
        pytest.importorskip("chromadb", reason="chromadb is not installed")
    few = Corpus(list(TOWNS.values())[:12])
    wanted = settings(tmp_path / "index", store=store)
    with monkeypatch.context() as patched:
        patched.setattr("leret.retrieval.index.manifest.write_manifest", stopped)
        with pytest.raises(KeyboardInterrupt):
            load_retriever(wanted, few, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Encoder, "encode", lambda *_: pytest.fail("encoded again"))
        load_retriever(wanted, few, tmp_path)
    assert len(open_index(tmp_path / "index").search(["a mill"], 12)[0]) == 12
    assert not list((tmp_path / "index").glob("*shards*"))


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(minilm(), model)
    few = Corpus(list(TOWNS.values())[:3])
    index = tmp_path / "index"
    load_retriever(DenseSettings(index=str(index), model=str(model)), few, tmp_path)
    with open(model / "vocab.txt", "a", encoding="utf-8") as file:
        file.write("another\n")
    with pytest.raises(RetrievalError, match="is not the model that the index was made with"):
        open_index(index)
    shutil.rmtree(model)
    with pytest.raises(RetrievalError, match=r"its model .* is gone"):
        open_index(index)


@pytest.mark.parametrize(
    ("name", "says"),
    [("/nowhere/model", "no model directory /nowhere/model"), ("owner/name", "the hub does not give it")],
)
def test_a_missing_model_is_said(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    wanted = DenseSettings(model=name)
    with pytest.raises(RetrievalError, match=says):
        load_retriever(wanted, TOWNS, tmp_path)


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (None, "UnpicklingError"),
        ([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Nowhere"}], "ImportError"),
        ([{"idx": 0, "name": "0", "path": "", "type": 3}], "AttributeError"),
        ([3], "TypeError"),
    ],
    ids=["pickled weights", "an unknown module", "a module without a name", "no module"],
)
def test_a_model_that_cannot_be_opened_is_said(tmp_path: Path, modules: object, says: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(minilm(), model, ignore=shutil.ignore_patterns("*.safetensors", "onnx", "openvino"))
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": print}))
    if modules is not None:
        (model / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(RetrievalError, match=rf"cannot be opened as a sentence-transformers model \({says}"):
        Encoder(model, DenseSettings(model="m", device="cpu"))


@pytest.mark.parametrize("device", ["gpu"])
def test_a_device_that_is_not_there_is_said(device: str) -> None:
    with pytest.raises(RetrievalError, match=f"retriever.device: torch cannot use {device} .*; name cpu, or auto"):
        encoder(device=device)


def test_more_tokens_than_the_model_can_read_are_refused_before_the_build() -> None:
    with pytest.raises(RetrievalError, match=r"max_length: .* cannot read 513 tokens .*; its own limit is 256"):
        encoder(max_length=513)
    assert encoder(max_length=512).encode(["word " * 2000]).shape == (1, 384)
