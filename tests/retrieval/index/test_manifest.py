"""Saved indexes: mapped, checked against their corpus, built whole or not at all."""

from __future__ import annotations

import errno
import json
import mmap
from collections.abc import Callable
from pathlib import Path

import bm25s
import numpy as np
import pytest

from leret.config.retriever import BM25Settings
from leret.core.errors import RetrievalError
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.base import Retriever
from leret.retrieval.engines.bm25 import BM25, _matrix
from leret.retrieval.load import load_retriever

_CORPUS = Corpus(Document(f"d{i}", f"title {i}", f"word{i} common text") for i in range(9))
_OTHER = Corpus(Document(f"d{i}", f"title {i}", f"word{i} another text") for i in range(9))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def reopen(corpus: Corpus, saved: Path, **settings: object) -> Retriever:
    """The index of a run's cache, built again where it does not fit."""
    return load_retriever(BM25Settings(**settings), corpus, saved.parent)  # type: ignore[arg-type]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    BM25.build(_CORPUS, tmp_path / "cache" / "bm25", k1=1.2, stopwords=None)
    return tmp_path / "cache" / "bm25"


def test_arrays_are_mapped_and_not_copied(saved: Path) -> None:
    data = BM25.open(saved, _CORPUS).index.data
    owner: object = data
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, mmap.mmap)
    assert not data.flags.writeable


def test_more_entries_than_32_bits_can_count_keep_their_places() -> None:
    starts = np.array([0, 5, 2**31 + 5], np.int64)
    made = _matrix({"a": 0, "b": 1}, np.zeros(0), np.zeros(0), starts)
    assert made.indptr.tolist() == [0, 5, 2**31 + 5]


def test_bm25s_can_open_the_directory_too(saved: Path) -> None:
    engine = bm25s.BM25.load(str(saved))
    documents, _ = engine.retrieve([["word3"]], k=1, show_progress=False)
    assert documents[0, 0] == 3


@pytest.mark.parametrize(
    ("corpus", "settings"),
    [
        pytest.param(_OTHER, {"k1": 1.2, "stopwords": None}, id="corpus"),
        pytest.param(_CORPUS, {"k1": 1.5, "stopwords": None}, id="k1"),
        pytest.param(_CORPUS, {"k1": 1.2, "stopwords": None, "fold_accents": False}, id="words"),
    ],
)
def test_another_corpus_or_setting_builds_it_again(saved: Path, corpus: Corpus, settings: dict[str, object]) -> None:
    made = reopen(corpus, saved, **settings)
    assert made.digest == BM25.open(saved, corpus).digest == BM25.build(corpus, **settings).digest  # type: ignore[arg-type]
    assert names(saved.parent) == ["bm25"]


def test_whoever_has_the_old_index_open_keeps_it(saved: Path) -> None:
    old = BM25.open(saved, _CORPUS)
    before = old.search(["common"], 3)
    reopen(_OTHER, saved)
    assert old.search(["common"], 3) == before


def _truncate(name: str) -> object:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def _change(name: str, place: int, value: int) -> object:
    """One value of an array; the file keeps its size."""

    def harm(folder: Path) -> None:
        path = folder / (name if name.endswith(".npy") else f"{name}.csc.index.npy")
        values = np.load(path)
        values[place] = value
        np.save(path, values)

    return harm


def _words(column: Callable[[int], object]) -> object:
    """The column of one word, of as many words as given to ``column``."""

    def harm(folder: Path) -> None:
        path = folder / "vocab.index.json"
        words = json.loads(path.read_text())
        path.write_text(json.dumps({**words, "common": column(len(words))}))

    return harm


BROKEN = [
    pytest.param(lambda folder: (folder / "manifest.json").unlink(), "is no index", id="no-manifest"),
    pytest.param(lambda folder: (folder / "manifest.json").write_text("{"), "is no index", id="broken-manifest"),
    pytest.param(
        lambda folder: (folder / "manifest.json").write_text('{"format": 9}'),
        "no manifest of format 2",
        id="other-format",
    ),
    pytest.param(
        lambda folder: (folder / "vocab.index.json").unlink(),
        "cannot be read.*build it again",
        id="no-vocabulary",
    ),
    pytest.param(_truncate("data.csc.index.npy"), "cannot be read.*build it again", id="truncated-array"),
    pytest.param(lambda folder: (folder / "indptr.csc.index.npy").write_bytes(b""), "cannot be read", id="empty-array"),
    pytest.param(
        lambda folder: np.save(folder / "indptr.csc.index.npy", np.zeros(3, np.int32)),
        "do not fit together",
        id="other-array",
    ),
    pytest.param(
        lambda folder: np.save(folder / "data.csc.index.npy", np.array([{}]), allow_pickle=True),
        "cannot be read",
        id="pickled-array",
    ),
    pytest.param(_change("indices", 0, 9), "names document 9, and there are 9", id="place-past-the-end"),
    pytest.param(_change("indices", 0, 2_000_000_000), "names document 2000000000", id="place-far-away"),
    pytest.param(_change("indices", 0, -1), "names document 4294967295", id="negative-place"),
    pytest.param(_change("indptr", 0, 1), "do not fit together", id="first-column-late"),
    pytest.param(_change("indptr", 0, -1), "do not fit together", id="negative-column"),
    pytest.param(_change("indptr", 1, 2**62), "do not fit together", id="columns-that-fall"),
    pytest.param(_words(lambda n: n), "do not fit together", id="word-past-the-end"),
    pytest.param(_words(lambda n: -1), "do not fit together", id="negative-word"),
    pytest.param(_words(lambda n: 10**30), "cannot be read", id="endless-word"),
    pytest.param(_words(lambda n: None), "cannot be read", id="word-without-a-column"),
    pytest.param(lambda folder: (folder / "vocab.index.json").write_text("[" * 9999), "cannot be read", id="deep-json"),
]


@pytest.mark.parametrize(("harm", "match"), BROKEN)
def test_a_broken_index_is_refused_and_built_again_in_a_cache(saved: Path, harm: object, match: str) -> None:
    harm(saved)  # type: ignore[operator]
    with pytest.raises(RetrievalError, match=match):
        BM25.open(saved, _CORPUS)
    assert len(reopen(_CORPUS, saved, k1=1.2, stopwords=None).search(["common"], 9)[0]) == 9


def test_a_full_disk_leaves_the_old_index_and_no_litter(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(RetrievalError, match=r"cannot be written \(No space left on device\); free some space"):
        reopen(_OTHER, saved)
    assert names(saved.parent) == ["bm25"]
    assert json.loads((saved / "manifest.json").read_text())["corpus"] == _CORPUS.digest
