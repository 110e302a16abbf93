"""ColBERT with colbert-ai: against exact MaxSim, in batches and threads, after a killed compile, a downloaded index.

The checkpoints have an untrained projection: they test plumbing, and say nothing about the quality of ColBERTv2.
"""

import importlib
import json
import shutil

import numpy as np
import pytest

from leret.config.retriever import ColbertSettings
from leret.core.errors import RetrievalError
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.colbert import check_downloaded
from leret.retrieval.engines.colbert_compat import _imported
from leret.retrieval.load import load_retriever, open_index
from tests.retrieval.small import ANIMALS, colbert_checkpoint

pytest.importorskip("colbert", reason="colbert-ai is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
"""The first use compiles C++ for a minute or three; test_colbert_index.py has what needs no compiler."""

QUERIES = [f"which town by the river has number {i}" for i in range(8)] + ["cat on a mat", "where do birds fly"]
IDS = list(ANIMALS)
TURNED = Corpus(reversed(list(ANIMALS.values())))


def passages(corpus):
    texts = [f"{d.title} | {d.text}" if d.title else d.text for d in corpus.values()]
    return [text.replace("\ud800", "\ufffd") for text in texts]


def build(checkpoint, index, corpus=ANIMALS):
    return load_retriever(ColbertSettings(index=str(index), checkpoint=str(checkpoint), nbits=4), corpus, index.parent)


def ids(rankings):
    return [[passage.doc_id for passage in ranking] for ranking in rankings]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return colbert_checkpoint(tmp_path_factory.mktemp("colbert") / "checkpoint", tiny=True, dim=32)


@pytest.fixture(scope="module")
def built(checkpoint):
    build(checkpoint, checkpoint.parent / "index")
    return checkpoint.parent / "index"


@pytest.fixture(scope="module")
def expected(built):
    return open_index(built).search(QUERIES, 7)


@pytest.fixture
def wiki(built, checkpoint, tmp_path):
    """A downloaded index that brings its checkpoint."""
    index = shutil.copytree(built / "plaid", tmp_path / "indexes" / "wiki")
    shutil.copytree(checkpoint, index / "model")
    values = json.loads((index / "metadata.json").read_text())
    values["config"]["checkpoint"] = "model"
    (index / "metadata.json").write_text(json.dumps(values))
    return index


def write_collection(wiki, corpus):
    lines = "".join(f"{i}\t{text}\n" for i, text in enumerate(passages(corpus)))
    (wiki.parent / "collection.tsv").write_text(lines, encoding="utf-8")


def test_rankings_approximate_exact_late_interaction(tmp_path):
    torch = pytest.importorskip("torch")
    retriever = build(colbert_checkpoint(tmp_path / "checkpoint"), tmp_path / "index")
    model, n_shared = retriever._checkpoint, 0
    with torch.inference_mode():
        documents, lengths = model.docFromText(passages(ANIMALS), bsize=32, keep_dims="flatten")
        starts = np.cumsum([0, *lengths])[:-1]
        for query, ranking in zip(QUERIES, ids(retriever.search(QUERIES, 10)), strict=True):
            similarity = (documents @ model.queryFromText([query])[0].T).numpy()
            best = np.argsort(-np.maximum.reduceat(similarity, starts, axis=0).sum(axis=1), kind="stable")[:10]
            n_shared += len({IDS[row] for row in best} & set(ranking))
    assert n_shared >= 0.8 * 10 * len(QUERIES)


def test_a_small_k_does_not_freeze_a_later_larger_one(built):
    retriever = open_index(built)
    for k in (2, 60, 1000):
        assert [len(ranking) for ranking in retriever.search(QUERIES[:3], k)] == [min(k, len(ANIMALS))] * 3


def test_an_index_in_chunks_equals_one_chunk(checkpoint, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("colbert.data.collection.Collection.get_chunksize", lambda collection: 25)
    chunked = build(checkpoint, tmp_path / "index")
    assert (tmp_path / "index" / "plaid" / "1.codes.pt").exists()
    assert ids(chunked.search(QUERIES, 7)) == ids(expected)


def test_a_downloaded_index_opens_unchanged(checkpoint, wiki, expected, tmp_path):
    files = [path for path in wiki.iterdir() if path.is_file()]
    for path in files:
        path.chmod(0o444)
    before = {path.name: path.read_bytes() for path in files}
    recipe = ColbertSettings(index_root=str(wiki.parent), index_name="wiki", checkpoint=str(checkpoint), nbits=4)
    loaded = load_retriever(recipe, ANIMALS, tmp_path / "cache")
    assert ids(loaded.search(QUERIES, 7)) == ids(expected)
    assert open_index(tmp_path / "cache" / "colbert").digest == loaded.digest
    assert {path.name: path.read_bytes() for path in files} == before
    for other, says in [(TURNED, "have as many tokens"), (Corpus(list(ANIMALS.values())[:9]), "this one has 9")]:
        with pytest.raises(RetrievalError, match=f"is an index of another corpus.*{says}"):
            load_retriever(recipe, other, tmp_path / "cache")


def test_a_downloaded_index_opens_with_its_collection(wiki, expected):
    with pytest.raises(RetrievalError, match=r"without its collection.tsv"):
        open_index(wiki)
    write_collection(wiki, ANIMALS)
    alone = open_index(wiki).search(QUERIES, 7)
    assert [[IDS[int(number)] for number in numbers] for numbers in ids(alone)] == ids(expected)
    assert alone[0][0].title == expected[0][0].title


def test_a_downloaded_index_is_compared_with_its_corpus(wiki):
    assert check_downloaded(wiki, ANIMALS) == len(ANIMALS)
    with pytest.raises(RetrievalError, match="have as many tokens"):
        check_downloaded(wiki, TURNED)
    write_collection(wiki, TURNED)
    assert check_downloaded(wiki, ANIMALS) == len(ANIMALS)
    with pytest.raises(RetrievalError, match="have as many tokens"):
        check_downloaded(wiki, None)
    (wiki / "0.codes.pt").write_bytes(b"")
    with pytest.raises(RetrievalError, match="cannot be read"):
        check_downloaded(wiki, None)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("artifact.metadata", None, "is not a ColBERT checkpoint"),
        ("config.json", b'{"model_type": "mystery"}', "cannot be opened as a ColBERT"),
        ("model.safetensors", b"x" * 100, "cannot be opened as a ColBERT"),
    ],
    ids=["settings", "architecture", "weights"],
)
def test_a_broken_checkpoint_is_reported(checkpoint, tmp_path, name, content, says):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / name).unlink() if content is None else (broken / name).write_bytes(content)
    with pytest.raises(RetrievalError, match=says):
        build(broken, tmp_path / "index")


def test_no_code_of_a_checkpoint_is_run(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer to a prompt of transformers
    evil = shutil.copytree(checkpoint, tmp_path / "evil")
    (evil / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.Evil"}}')
    (evil / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["configuration_evil.Evil", null]}}'
    )
    (evil / "configuration_evil.py").write_text(f"open({str(tmp_path / 'written')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(RetrievalError, match="has Python code"):
        build(evil, tmp_path / "index")
    _imported()
    for module in ("hf_colbert", "base_colbert"):
        loaders = vars(importlib.import_module(f"colbert.modeling.{module}"))
        for loader in {"AutoConfig", "AutoTokenizer"} & loaders.keys():
            for options in ({}, {"trust_remote_code": True}):
                with pytest.raises(ValueError, match="custom code"):
                    loaders[loader].from_pretrained(str(evil), **options)
    assert not (tmp_path / "written").exists()


def test_a_corpus_too_small_for_centroids_is_refused(checkpoint, tmp_path):
    with pytest.raises(RetrievalError, match=r"could not build|too few"):
        build(checkpoint, tmp_path / "index", Corpus([ANIMALS["empty"]]))
