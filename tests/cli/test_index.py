import json

import pytest

from tests.datasets.writing import json_lines
from tests.first_steps import refused, succeeds

CORPUS = [{"doc_id": f"d{i}", "title": "T", "text": f"The {word} sat on the mat."} for i, word in enumerate("abc")]
BM25 = ["--kind", "bm25", "--corpus", "corpus.jsonl"]
BUILD = ["index", "build", *BM25, "--out", "idx"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    json_lines(tmp_path / "corpus.jsonl", CORPUS)
    return tmp_path


def test_an_index_is_built_once_and_only_an_index_is_replaced_and_only_by_force(folder):
    for flag, says, built in ("--dry-run", "would build", False), ("--force", "3 documents", True):
        assert says in succeeds(*BUILD, flag)
        assert (folder / "idx").exists() is built
    manifest = folder / "idx/manifest.json"
    before = manifest.stat().st_mtime_ns
    assert "nothing to do" in succeeds(*BUILD)
    assert manifest.stat().st_mtime_ns == before
    assert "holds a different index" in refused(*BUILD, "--set", "k1=0.9")
    succeeds(*BUILD, "--set", "k1=0.9", "--force")
    assert json.loads(manifest.read_text())["settings"]["k1"] == 0.9
    manifest.unlink()
    assert "exists and is not an index" in refused(*BUILD, "--force")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--kind", "bm25"], "or --kind and --corpus"),
        (["--kind", "bm26", *BM25[2:]], "--kind retriever.kind: 'bm26' is not one of"),
        ([*BM25, "--set", "k2=1"], "retriever.k2: unknown key"),
        (["--kind", "pubmed", *BM25[2:]], "pubmed has no index to build"),
        (["--kind", "dense", *BM25[2:]], "--set model: missing"),
        (["sampling/demo.yaml", *BM25], "remove --kind, --corpus"),
    ],
)
def test_mistakes_are_refused_with_a_remedy(args, says):
    assert says in refused("index", "build", *args, "--out", "idx")


def test_an_index_without_bad_lines_is_checked_against_its_corpus(folder):
    with (folder / "corpus.jsonl").open("a") as file:
        file.write("{bad\n")
    skip = ["--set", "data.skip_invalid=true"]
    succeeds(*BUILD, *skip)
    assert " ".join(skip) in refused("index", "check", "idx", "--corpus", "corpus.jsonl")
    succeeds("index", "check", "idx", "--corpus", "corpus.jsonl", *skip)
    assert "--corpus" in refused("index", "check", "idx", *skip)


def test_check_shows_the_manifest_and_reads_the_whole_index(folder):
    index = folder / "idx"
    assert "idx: 3 documents" in succeeds(*BUILD)
    found = json.loads(succeeds("index", "check", index, "--json"))
    assert (found["engine"], found["documents"], found["settings"]["k1"]) == ("bm25", 3, 1.5)
    assert ["engine", "bm25"] in [line.split() for line in succeeds("index", "check", index).splitlines()]
    succeeds("index", "check", index, "--corpus", "corpus.jsonl")
    json_lines(folder / "other.jsonl", CORPUS[:2])
    assert "is an index of a different corpus" in refused("index", "check", index, "--corpus", "other.jsonl")
    broken = index / "documents.arrow"
    broken.write_bytes(broken.read_bytes().replace(b"a sat", b"b sat"))
    assert "documents.arrow has changed" in refused("index", "check", index)
