"""What a downloaded ColBERT index or checkpoint may make leret do: nothing that nobody here has asked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leret.core.errors import RetrievalError
from leret.core.progress import Silent
from leret.retrieval.engines.colbert import _Encoder, open_checkpoint
from leret.retrieval.engines.colbert_index import PlaidIndex
from leret.retrieval.load import open_index

EVIL = r'{"model_type": "bert", "\u0061uto_map": {"AutoConfig": "configuration_evil.Evil"}}'


def downloaded(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text(json.dumps({"num_chunks": 0, "config": config}))
    (directory / "centroids.pt").write_bytes(b"")
    return directory


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", EVIL, r"code of its own \(auto_map in config.json\)"),
        ("tokenizer_config.json", '{"x": [{"y": {"auto_map": null}}]}', r"\(auto_map in tokenizer_config.json\)"),
        ("config.json", '{"auto_map": {}, "auto_map": null}', "code of its own"),
        ("config.json", '{"custom_pipelines": {"x": {"impl": "evil.Evil"}}}', "custom_pipelines in config.json"),
        ("config.json", "[" * 99_999, "cannot be opened as a ColBERT checkpoint"),
        ("config.json", "{", "cannot be opened as a ColBERT checkpoint"),
    ],
    ids=["escaped", "deep", "twice", "pipelines", "nested", "broken"],
)
def test_a_checkpoint_with_code_is_refused_before_it_is_opened(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(text)
    library = SimpleNamespace(Checkpoint=lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(RetrievalError, match=says):
        open_checkpoint(library, tmp_path, None)


@pytest.mark.parametrize(
    "named", ["attacker/evil-colbert", "/", "..", "../outside", "link", "", None, "a\0b", 3, "a" * 5000, "\ud800"]
)
def test_no_hub_and_no_path_outside_is_taken_from_a_downloaded_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: object
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "collection.tsv").write_text("0\ttext\n")
    index = downloaded(tmp_path / "index", checkpoint=named, collection=named)
    (index / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(RetrievalError, match=r"not inside of it.*--kind colbert --model CHECKPOINT"):
        open_index(index)


def test_a_checkpoint_and_a_collection_inside_of_the_index_are_its_own(tmp_path: Path) -> None:
    secret = tmp_path / "secret.tsv"
    secret.write_text("0\tsecret\n")
    index = downloaded(tmp_path / "index", checkpoint="model", collection="texts.tsv")
    (index / "model").mkdir()
    (index / "texts.tsv").write_text("0\ttext\n")
    found = PlaidIndex.open(index)
    assert (found.own_checkpoint(), found.collection) == (index / "model", index / "texts.tsv")
    assert PlaidIndex.open(downloaded(tmp_path / "other", collection=str(secret))).collection is None


@pytest.mark.parametrize("text", ["[]", "{}", "[" * 99_999])
def test_metadata_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    (downloaded(tmp_path / "index") / "metadata.json").write_text(text)
    with pytest.raises(RetrievalError, match="is no index of ColBERT"):
        PlaidIndex.open(tmp_path / "index")


TEXTS = [" ".join(["word"] * (1 + i % 4)) for i in range(42)]


class WordVectors:
    """A vector a word, which holds the number of the text."""

    def __init__(self) -> None:
        self.n_encoded = 0

    def docFromText(self, texts: list[str], bsize: int, keep_dims: str) -> tuple[Any, list[int]]:  # noqa: N802
        counts = [len(text.split()) for text in texts]
        rows = [float(self.n_encoded + i) for i, n in enumerate(counts) for _ in range(n)]
        self.n_encoded += len(texts)
        torch = pytest.importorskip("torch")
        return torch.tensor(rows)[:, None], counts


def encoder(n_documents: int) -> tuple[_Encoder, WordVectors]:
    model = WordVectors()
    return _Encoder(model, 1, n_documents, Silent()), model


@pytest.mark.parametrize("size", [42, 25, 1])
def test_a_sample_of_all_documents_is_all_that_is_encoded(size: int) -> None:
    torch = pytest.importorskip("torch")
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
