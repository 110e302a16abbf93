import errno
import json

import numpy as np
import pytest

from leret.config.retriever import BM25Settings
from leret.core.errors import RetrievalError
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.bm25 import BM25
from leret.retrieval.index.manifest import read_manifest, write_manifest
from leret.retrieval.load import load_retriever, open_index

CORPUS, OTHER = (
    Corpus(Document(f"d{i}", f"title {i}", f"word{i} {word} text") for i in range(9)) for word in ("common", "another")
)
SETTINGS = {"k1": 1.2, "stopwords": None}


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def reopen(corpus, saved, **settings):
    return load_retriever(BM25Settings(**settings), corpus, saved.parent)


@pytest.fixture
def saved(tmp_path):
    BM25.build(CORPUS, tmp_path / "cache" / "bm25", **SETTINGS)
    return tmp_path / "cache" / "bm25"


@pytest.mark.parametrize("change", [{}, {"k1": 1.5}])
def test_a_changed_corpus_or_setting_rebuilds_the_index(saved, change):
    corpus = CORPUS if change else OTHER
    old = open_index(saved)
    before = old.search(["common"], 3)
    rebuilt = reopen(corpus, saved, **SETTINGS | change)
    assert rebuilt.digest == open_index(saved).digest == BM25.build(corpus, **SETTINGS | change).digest
    assert rebuilt.digest != old.digest
    assert names(saved.parent) == ["bm25"]
    assert old.search(["common"], 3) == before


def change(name, place, value):
    def harm(folder):
        values = np.load(folder / f"{name}.csc.index.npy")
        values[place] = value
        np.save(folder / f"{name}.csc.index.npy", values)

    return harm


def reword(old, new):
    return lambda folder: (folder / WORDS).write_text((folder / WORDS).read_text().replace(old, new))


def fit(harm):
    return lambda folder: (harm(folder), write_manifest(read_manifest(folder), folder))


WORDS, MANIFEST = "vocab.index.json", "manifest.json"
BROKEN = {
    "no manifest": (lambda d: (d / MANIFEST).unlink(), "is not an index"),
    "other format": (lambda d: (d / MANIFEST).write_text('{"format": 9}'), "format 9 instead of 3"),
    "no vocabulary": (lambda d: (d / WORDS).unlink(), "is missing.*build it again"),
    "word past the end": (fit(reword("11", "99")), "do not match"),
    "place past the end": (fit(change("indices", 0, 9)), "row 9 but has 9 documents"),
    "columns that fall": (fit(change("indptr", 1, 2**62)), "do not match"),
}


@pytest.mark.parametrize(("harm", "match"), BROKEN.values(), ids=BROKEN)
def test_a_broken_index_is_refused_and_rebuilt_in_a_cache(saved, harm, match):
    harm(saved)
    with pytest.raises(RetrievalError, match=match):
        open_index(saved)
    assert len(reopen(CORPUS, saved, **SETTINGS).search(["common"], 9)[0]) == 9


def test_a_full_disk_leaves_the_old_index(saved, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(RetrievalError, match=r"cannot write the index \(No space left on device\); free some space"):
        reopen(OTHER, saved)
    assert names(saved.parent) == ["bm25"]
    assert json.loads((saved / "manifest.json").read_text())["corpus"] == CORPUS.digest
