"""`leret index` and `leret search`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leret.cli.app import app

CORPUS = [
    {"doc_id": "d1", "title": "Cat", "text": "The cat sat on the mat."},
    {"doc_id": "d2", "title": "Dog", "text": "A dog \x1b[31mbarks\x07 at the postman."},
    {"doc_id": "d3", "title": "Bird [bold]", "text": "far away " * 100 + "the bird sings of a cat."},
]

HYBRID = ["--kind", "hybrid", "--corpus", "CORPUS", "--set", "engines=[{kind: bm25}, {kind: tantivy}]"]


def leret(*args: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", CORPUS)


@pytest.fixture
def index(tmp_path: Path, corpus: Path) -> Path:
    code, out, err = leret("index", "build", "--kind", "bm25", "--corpus", corpus, "--out", tmp_path / "idx")
    assert (code, "idx: 3 documents" in out) == (0, True), out + err
    return tmp_path / "idx"


def test_a_second_build_has_nothing_to_do(index: Path, corpus: Path) -> None:
    before = (index / "manifest.json").stat().st_mtime_ns
    code, out, _ = leret("index", "build", "--kind", "bm25", "--corpus", corpus, "--out", index)
    assert code == 0
    assert "nothing to do" in out
    assert (index / "manifest.json").stat().st_mtime_ns == before


def test_another_index_is_replaced_only_by_force(index: Path, corpus: Path) -> None:
    command = ["index", "build", "--kind", "bm25", "--corpus", str(corpus), "--out", str(index), "--set", "k1=0.9"]
    code, _, err = leret(*command)
    assert code == 2
    assert "is another index" in err
    assert "--force" in err
    assert leret(*command, "--force")[0] == 0
    assert json.loads((index / "manifest.json").read_text())["settings"]["k1"] == 0.9


def test_what_is_no_index_is_never_overwritten(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    code, _, err = leret("index", "build", "--kind", "bm25", "--corpus", corpus, "--out", tmp_path / "mine", "--force")
    assert code == 2
    assert "is no index; name another directory" in err
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_dry_run_builds_nothing(tmp_path: Path, corpus: Path) -> None:
    code, out, _ = leret("index", "build", "--kind", "bm25", "--corpus", corpus, "--out", tmp_path / "x", "--dry-run")
    assert code == 0
    assert "would build" in out
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--kind", "bm25"], "give --kind and --corpus"),
        (["--kind", "bm26", "--corpus", "CORPUS"], "'bm26' is not one of"),
        (["--kind", "bm25", "--corpus", "nowhere.jsonl"], "--corpus"),
        (["--kind", "bm25", "--corpus", "CORPUS", "--set", "k2=1"], "unknown key"),
        (["--kind", "bm25", "--corpus", "CORPUS", "--set", "b=2"], "must be at most 1"),
        (["--kind", "bm25", "--corpus", "CORPUS", "--set", "k1=.inf"], "retriever.k1: input should be a finite number"),
        (["--kind", "dense", "--corpus", "CORPUS", "--model", "m", "--set", "hnsw_m=1"], "hnsw_m: must be at least 2"),
        ([*HYBRID, "--set", "weights=[0, 0]"], "weights: both are 0"),
        ([*HYBRID, "--set", "rank_constant=.inf"], "rank_constant: input should be a finite number"),
        (
            ["--kind", "bm25", "--corpus", "CORPUS", "--set", "model=x"],
            "model: not of this kind, but of dense",
        ),
        (["--kind", "pubmed", "--corpus", "CORPUS"], "pubmed has no index of its own"),
        (["--kind", "hybrid", "--corpus", "CORPUS"], "needs two engines"),
        (["--kind", "dense", "--corpus", "CORPUS"], "--kind dense needs --model"),
        (["--kind", "colbert", "--corpus", "CORPUS"], "--kind colbert needs --model"),
        (["--kind", "bm25", "--corpus", "CORPUS", "--model", "x"], "--model is of kind dense and colbert, not of bm25"),
        (["--kind", "hybrid", "--corpus", "CORPUS", "--model", "x"], "not of hybrid; remove it"),
        (["sampling/demo.yaml", "--corpus", "CORPUS", "--kind", "bm25"], "leave --kind, --corpus out"),
        (["sampling/demo.yaml", "--model", "x"], "leave --model out"),
        (["sampling/demo.yaml", "--format", "jsonl", "--skip-invalid"], "leave --format, --skip-invalid out"),
    ],
)
def test_a_mistake_is_told_with_its_mend(tmp_path: Path, corpus: Path, args: list[str], says: str) -> None:
    args = [str(corpus) if arg == "CORPUS" else arg for arg in args]
    code, _, err = leret("index", "build", *args, "--out", tmp_path / "x")
    assert code == 2
    assert says in err
    assert "Traceback" not in err


def test_a_recipe_names_engine_and_corpus(tmp_path: Path) -> None:
    code, out, err = leret("index", "build", "sampling/demo.yaml", "--out", tmp_path / "x")
    assert code == 0, err
    assert "documents" in out
    assert leret("index", "info", tmp_path / "x")[0] == 0


def test_info_tells_the_manifest(index: Path) -> None:
    code, out, _ = leret("index", "info", index)
    assert code == 0
    assert "bm25" in out
    assert "documents" in out
    found = json.loads(leret("index", "info", index, "--json")[1])
    assert (found["engine"], found["documents"], found["settings"]["k1"]) == ("bm25", 3, 1.5)


def test_an_index_that_left_bad_lines_out_is_checked_against_its_corpus(tmp_path: Path, corpus: Path) -> None:
    with corpus.open("a") as file:
        file.write("{bad\n")
    index = tmp_path / "x"
    assert leret("index", "build", "--kind", "bm25", "--corpus", corpus, "--out", index, "--skip-invalid")[0] == 0
    code, _, err = leret("index", "check", index, "--corpus", corpus)
    assert (code, "--skip-invalid" in err) == (2, True)
    assert leret("index", "check", index, "--corpus", corpus, "--skip-invalid")[0] == 0
    code, _, err = leret("index", "check", index, "--skip-invalid")
    assert (code, "--corpus" in err) == (2, True)


def test_check_reads_it_through(index: Path, corpus: Path, tmp_path: Path) -> None:
    assert leret("index", "check", index)[0] == 0
    assert leret("index", "check", index, "--corpus", corpus)[0] == 0
    other = write(tmp_path / "other.jsonl", CORPUS[:2])
    code, _, err = leret("index", "check", index, "--corpus", other)
    assert (code, "is an index of another corpus" in err) == (2, True)
    broken = index / "documents.bin"
    broken.write_bytes(broken.read_bytes().replace(b"cat sat", b"bat cat"))
    code, _, err = leret("index", "check", index)
    assert code == 2
    assert "documents.bin is not what was written" in err


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """The files of a downloaded index of ColBERT, its vectors empty."""
    folder = tmp_path / "wiki"
    folder.mkdir()
    config = {"nbits": 2, "checkpoint": "models/colbertv2.0", "doc_maxlen": 180}
    values = {"config": config, "num_chunks": 2, "num_embeddings": 12}
    (folder / "metadata.json").write_text(json.dumps(values))
    for chunk, counts in enumerate([[3, 4], [5]]):
        (folder / f"doclens.{chunk}.json").write_text(json.dumps(counts))
        for part in ("codes.pt", "residuals.pt", "metadata.json"):
            (folder / f"{chunk}.{part}").write_bytes(b"")
    for name in ("centroids.pt", "avg_residual.pt", "buckets.pt"):
        (folder / name).write_bytes(b"")
    return folder


def test_info_tells_what_a_downloaded_index_says(downloaded: Path) -> None:
    code, out, err = leret("index", "info", downloaded)
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    for line in (["documents", "3"], ["chunks", "2"], ["bits", "2"], ["checkpoint", "models/colbertv2.0"]):
        assert line in lines
    assert json.loads(leret("index", "info", downloaded, "--json")[1])["vectors"] == 12


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("1.codes.pt", None, "1.codes.pt is missing"),
        ("doclens.1.json", "[6]", "it says 12 vectors, and its doclens are of 13"),
        ("doclens.1.json", None, "its doclens cannot be read"),
        ("doclens.1.json", "[", "its doclens cannot be read"),
        ("0.codes.pt", "", "its collection.tsv is not with it"),
    ],
)
def test_check_tells_what_a_downloaded_index_lacks(downloaded: Path, name: str, text: str | None, says: str) -> None:
    (downloaded / name).unlink() if text is None else (downloaded / name).write_text(text)
    code, _, err = leret("index", "check", downloaded)
    assert (code, says in err) == (2, True), err
