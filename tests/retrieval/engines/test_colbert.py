"""ColBERT with colbert-ai: against exact MaxSim, in batches and threads, after a killed compile, a downloaded index.

The checkpoints have an untrained projection: they test plumbing, and say nothing about the quality of ColBERTv2.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leret.config.retriever import ColbertSettings
from leret.core.errors import RetrievalError
from leret.datasets.corpus import Corpus
from leret.retrieval.base import Retriever
from leret.retrieval.engines.colbert import check_downloaded
from leret.retrieval.engines.colbert_compat import _imported
from leret.retrieval.load import load_retriever, open_index
from tests.retrieval.small import ANIMALS, colbert_checkpoint

pytest.importorskip("colbert", reason="colbert-ai is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
"""The first use compiles C++ for a minute or three; test_colbert_index.py has what needs no compiler."""

QUERIES = [f"which town by the river has number {i}" for i in range(8)] + ["cat on a mat", "where do birds fly"]


def settings(checkpoint: Path, index: Path, **more: Any) -> ColbertSettings:
    return ColbertSettings(index=str(index), checkpoint=str(checkpoint), **more)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colbert_checkpoint(tmp_path_factory.mktemp("colbert") / "checkpoint", tiny=True, dim=32)


@pytest.fixture(scope="module")
def built(checkpoint: Path) -> tuple[Path, Retriever]:
    directory = checkpoint.parent / "index"
    load_retriever(settings(checkpoint, directory, nbits=4), ANIMALS, directory.parent)
    return directory, open_index(directory)  # alone


def exact(retriever: Any, texts: Sequence[str], queries: Sequence[str], k: int) -> list[list[int]]:
    """Places of the best documents by MaxSim over uncompressed vectors."""
    import torch

    model = retriever._checkpoint
    with torch.inference_mode():
        documents, lengths = model.docFromText(list(texts), bsize=32, keep_dims="flatten")
        starts = np.cumsum([0, *lengths])[:-1]
        found = []
        for query in queries:
            vectors = model.queryFromText([query])[0]
            best = np.maximum.reduceat((documents @ vectors.T).numpy(), starts, axis=0).sum(axis=1)
            found.append(np.argsort(-best, kind="stable")[:k].tolist())
    return found


def overlap(rankings: Sequence[Sequence[Any]], best: Sequence[Sequence[int]], ids: Sequence[str]) -> float:
    """Mean share of the exact best that were found."""
    shares = [
        len({passage.doc_id for passage in ranking} & {ids[place] for place in places}) / len(places)
        for ranking, places in zip(rankings, best, strict=True)
    ]
    return sum(shares) / len(shares)


def _ids(rankings: Sequence[Sequence[Any]]) -> list[list[str]]:
    return [[passage.doc_id for passage in ranking] for ranking in rankings]


def test_it_finds_what_exact_late_interaction_finds(tmp_path: Path) -> None:
    real = settings(colbert_checkpoint(tmp_path / "checkpoint"), tmp_path / "index", nbits=4)
    load_retriever(real, ANIMALS, tmp_path)
    retriever = open_index(tmp_path / "index")
    texts = [f"{d.title} | {d.text}" if d.title else d.text for d in ANIMALS.values()]
    texts = [text.replace("\ud800", "�") for text in texts]
    best = exact(retriever, texts, QUERIES, 10)
    assert overlap(retriever.search(QUERIES, 10), best, list(ANIMALS)) >= 0.8


def test_a_small_k_does_not_freeze_a_later_larger_one(built: tuple[Path, Retriever]) -> None:
    retriever = open_index(built[0])
    assert [len(ranking) for ranking in retriever.search(QUERIES[:3], 2)] == [2, 2, 2]
    assert [len(ranking) for ranking in retriever.search(QUERIES[:3], 60)] == [60, 60, 60]
    assert [len(ranking) for ranking in retriever.search(QUERIES[:3], 1000)] == [len(ANIMALS)] * 3


def test_an_index_in_several_chunks_equals_that_of_one(
    checkpoint: Path, built: tuple[Path, Retriever], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colbert.data.collection import Collection

    monkeypatch.setattr(Collection, "get_chunksize", lambda collection: 25)
    made = load_retriever(settings(checkpoint, tmp_path / "index", nbits=4), ANIMALS, tmp_path)
    assert (tmp_path / "index" / "plaid" / "1.codes.pt").exists()
    assert _ids(made.search(QUERIES, 5)) == _ids(built[1].search(QUERIES, 5))


def with_checkpoint(plaid: Path, checkpoint: Path, index: Path) -> None:
    """A downloaded index that brings its checkpoint."""
    shutil.copytree(plaid, index)
    shutil.copytree(checkpoint, index / "model")
    values = json.loads((index / "metadata.json").read_text())
    values["config"]["checkpoint"] = "model"
    (index / "metadata.json").write_text(json.dumps(values))


def test_a_downloaded_index_opens_unchanged(checkpoint: Path, built: tuple[Path, Retriever], tmp_path: Path) -> None:
    root = tmp_path / "indexes"
    with_checkpoint(built[0] / "plaid", checkpoint, root / "wiki")
    files = [path for path in (root / "wiki").iterdir() if path.is_file()]
    for path in files:
        path.chmod(0o444)
    before = {path.name: path.read_bytes() for path in files}
    recipe = ColbertSettings(index_root=str(root), index_name="wiki", checkpoint=str(checkpoint), nbits=4)
    opened = load_retriever(recipe, ANIMALS, tmp_path / "cache")
    assert _ids(opened.search(QUERIES, 7)) == _ids(built[1].search(QUERIES, 7))
    assert open_index(tmp_path / "cache" / "colbert").digest == opened.digest
    assert {path.name: path.read_bytes() for path in files} == before

    turned = Corpus(reversed(list(ANIMALS.values())))
    for other, says in [(turned, "have as many tokens"), (Corpus(list(ANIMALS.values())[:9]), "this one has 9")]:
        with pytest.raises(RetrievalError, match=f"is an index of another corpus.*{says}"):
            load_retriever(recipe, other, tmp_path / "cache")

    with pytest.raises(RetrievalError, match=r"its collection.tsv is not with it"):
        open_index(root / "wiki")
    lines = [f"{i}\t{d.title} | {d.text}" if d.title else f"{i}\t{d.text}" for i, d in enumerate(ANIMALS.values())]
    (root / "collection.tsv").write_text("\n".join(lines).replace("\ud800", "?") + "\n", encoding="utf-8")
    alone = open_index(root / "wiki").search(QUERIES, 7)
    assert [[list(ANIMALS)[int(i)] for i in ids] for ids in _ids(alone)] == _ids(opened.search(QUERIES, 7))
    assert alone[0][0].title == opened.search(QUERIES[:1], 1)[0][0].title


def test_a_downloaded_index_is_checked_against_its_collection_or_a_corpus(
    checkpoint: Path, built: tuple[Path, Retriever], tmp_path: Path
) -> None:
    with_checkpoint(built[0] / "plaid", checkpoint, tmp_path / "wiki")
    assert check_downloaded(tmp_path / "wiki", ANIMALS) == len(ANIMALS)
    turned = list(ANIMALS.values())[::-1]
    with pytest.raises(RetrievalError, match="have as many tokens"):
        check_downloaded(tmp_path / "wiki", Corpus(turned))
    lines = [f"{i}\t{d.title} | {d.text}" if d.title else f"{i}\t{d.text}" for i, d in enumerate(turned)]
    (tmp_path / "collection.tsv").write_text("\n".join(lines).replace("\ud800", "?") + "\n", encoding="utf-8")
    assert check_downloaded(tmp_path / "wiki", ANIMALS) == len(ANIMALS)
    with pytest.raises(RetrievalError, match="have as many tokens"):
        check_downloaded(tmp_path / "wiki", None)
    (tmp_path / "wiki" / "0.codes.pt").write_bytes(b"")
    with pytest.raises(RetrievalError, match="cannot be read"):
        check_downloaded(tmp_path / "wiki", None)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda folder: (folder / "artifact.metadata").unlink(), "is no ColBERT checkpoint"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "mystery"}'), "cannot be opened as a ColB"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "cannot be opened as a ColBERT"),
    ],
    ids=["settings", "config", "architecture", "weights"],
)
def test_a_broken_checkpoint_is_said(checkpoint: Path, tmp_path: Path, harm: Any, says: str) -> None:
    shutil.copytree(checkpoint, tmp_path / "broken")
    harm(tmp_path / "broken")
    with pytest.raises(RetrievalError, match=says):
        load_retriever(settings(tmp_path / "broken", tmp_path / "index"), ANIMALS, tmp_path)


@pytest.mark.parametrize("key", ["auto_map", r"\u0061uto_map"])
def test_no_code_of_a_checkpoint_is_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # which transformers asks for where nobody has decided
    evil = tmp_path / "evil"
    shutil.copytree(checkpoint, evil)
    (evil / "config.json").write_text(f'{{"model_type": "evil", "{key}": {{"AutoConfig": "configuration_evil.Evil"}}}}')
    (evil / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "Evil", "{key}": {{"AutoTokenizer": ["configuration_evil.Evil", null]}}}}'
    )
    (evil / "configuration_evil.py").write_text(f"open({str(tmp_path / 'written')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(RetrievalError, match="Python code of its own"):
        load_retriever(settings(evil, tmp_path / "index"), ANIMALS, tmp_path)
    _imported()
    for module in ("hf_colbert", "base_colbert"):
        loaders = vars(importlib.import_module(f"colbert.modeling.{module}"))
        for loader in sorted({"AutoConfig", "AutoTokenizer"} & loaders.keys()):
            with pytest.raises(ValueError, match="custom code"):
                loaders[loader].from_pretrained(str(evil))
            with pytest.raises(ValueError, match="custom code"):
                loaders[loader].from_pretrained(str(evil), trust_remote_code=True)
    assert not (tmp_path / "written").exists()


def test_a_corpus_too_small_for_centroids_is_said(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=r"could not build|too few"):
        load_retriever(settings(checkpoint, tmp_path / "index"), Corpus([ANIMALS["empty"]]), tmp_path)
