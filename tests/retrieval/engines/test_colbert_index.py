import json
from types import SimpleNamespace

import pytest

from leret.core.errors import RetrievalError
from leret.core.progress import Silent
from leret.retrieval.engines.colbert import _Encoder, open_checkpoint
from leret.retrieval.engines.colbert_index import PlaidIndex
from leret.retrieval.load import open_index

EVIL = r'{"model_type": "bert", "\u0061uto_map": {"AutoConfig": "configuration_evil.Evil"}}'


def downloaded(directory, **config):
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text(json.dumps({"num_chunks": 0, "config": config}))
    (directory / "centroids.pt").write_bytes(b"")
    return directory


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", EVIL, r"has Python code \(auto_map in config.json\)"),
        ("tokenizer_config.json", '{"x": [{"y": {"auto_map": null}}]}', r"\(auto_map in tokenizer_config.json\)"),
        ("config.json", '{"auto_map": {}, "auto_map": null}', "has Python code"),
        ("config.json", '{"custom_pipelines": {"x": {"impl": "evil.Evil"}}}', "custom_pipelines in config.json"),
        ("config.json", "[" * 99_999, "cannot be opened as a ColBERT checkpoint"),
        ("config.json", "{", "cannot be opened as a ColBERT checkpoint"),
    ],
    ids=["escaped", "deep", "twice", "pipelines", "nested", "broken"],
)
def test_a_checkpoint_with_code_is_refused(tmp_path, name, text, says):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(text)
    library = SimpleNamespace(Checkpoint=lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(RetrievalError, match=says):
        open_checkpoint(library, tmp_path, None)


@pytest.mark.parametrize(
    "named", ["attacker/evil-colbert", "/", "..", "../outside", "link", "", None, "a\0b", 3, "a" * 5000, "\ud800"]
)
def test_a_downloaded_index_cannot_name_outside_models(tmp_path, monkeypatch, named):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "collection.tsv").write_text("0\ttext\n")
    index = downloaded(tmp_path / "index", checkpoint=named, collection=named)
    (index / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(RetrievalError, match=r"not inside it.*--kind colbert --model CHECKPOINT"):
        open_index(index)


def test_models_and_collections_inside_an_index_are_used(tmp_path):
    (tmp_path / "secret.tsv").write_text("0\tsecret\n")
    index = downloaded(tmp_path / "index", checkpoint="model", collection="texts.tsv")
    (index / "model").mkdir()
    (index / "texts.tsv").write_text("0\ttext\n")
    plaid = PlaidIndex.open(index)
    assert (plaid.inner_checkpoint(), plaid.collection) == (index / "model", index / "texts.tsv")
    other = downloaded(tmp_path / "other", collection=str(tmp_path / "secret.tsv"))
    assert PlaidIndex.open(other).collection is None


@pytest.mark.parametrize("text", ["[]", "{}", "[" * 99_999])
def test_invalid_metadata_is_refused(tmp_path, text):
    (downloaded(tmp_path / "index") / "metadata.json").write_text(text)
    with pytest.raises(RetrievalError, match="is not a ColBERT index"):
        PlaidIndex.open(tmp_path / "index")


TEXTS = [" ".join([str(i)] * (1 + i % 4)) for i in range(42)]


def word_vectors(texts):
    """Return one vector per word with its number, and the number of words per text."""
    return [[float(word)] for text in texts for word in text.split()], [len(text.split()) for text in texts]


@pytest.mark.parametrize(
    ("sample", "size", "n_encoded"),
    [(TEXTS, 42, 42), (TEXTS, 25, 42), (TEXTS, 1, 42), (TEXTS[::2], 25, 21 + 42), ([], 25, 42)],
    ids=["all at once", "two chunks", "one by one", "a sample of some", "no sample"],
)
def test_a_small_collection_is_encoded_once(sample, size, n_encoded):
    def encode(texts, **_):
        encoded.extend(texts)
        vectors, counts = word_vectors(texts)
        return torch.tensor(vectors), counts

    torch, encoded = pytest.importorskip("torch"), []
    encoder = _Encoder(SimpleNamespace(docFromText=encode), 1, len(TEXTS), Silent())
    encoder.encode_passages(sample)
    for chunk in (TEXTS[start : start + size] for start in range(0, len(TEXTS), size)):
        vectors, counts = encoder.encode_passages(chunk)
        assert (vectors.tolist(), counts) == word_vectors(chunk)
    assert len(encoded) == n_encoded
