import gzip

import pytest

from leret.core.errors import DataError
from leret.core.types import Task
from tests.datasets.writing import json_lines, load


@pytest.fixture
def folder(tmp_path):
    json_lines(tmp_path / "corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": f"text {i}"} for i in range(4)])
    json_lines(tmp_path / "queries.jsonl", [{"_id": f"q{i}", "text": f"query {i}"} for i in range(4)])
    (tmp_path / "qrels").mkdir()
    head = "query-id\tcorpus-id\tscore\n"
    (tmp_path / "qrels" / "train.tsv").write_text(head + "q0\td0\t1\nq0\td1\t2\nq1\td1\t0\n")
    (tmp_path / "qrels" / "test.tsv").write_text(head + "q2\td2\t1\nq0\td3\t1\n")  # q0 stays in the first split
    return tmp_path


def test_qrels_are_the_splits_and_judgements_above_zero_the_gold(folder):
    data = load("beir", str(folder))
    assert data.tasks.items == (
        Task.question("q0", "query 0", None, ("d0", "d1"), split="train", relevance={"d0": 1, "d1": 2}),
        Task.question("q2", "query 2", None, ("d2",), split="test"),
    )
    assert len(data.corpus) == 4
    for path in (str(folder), f"{folder}/corpus.jsonl"):
        assert load("beir", str(folder), path).corpus.digest == data.corpus.digest


def test_files_of_the_folder_may_be_compressed(folder):
    before = load("beir", str(folder))
    for path in (folder / "corpus.jsonl", folder / "queries.jsonl", folder / "qrels" / "test.tsv"):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert load("beir", str(folder)).tasks == before.tasks


def test_a_missing_part_is_named(folder):
    for missing in ("corpus.jsonl", "queries.jsonl", "qrels"):
        (folder / missing).rename(folder / "away")
        with pytest.raises(DataError, match=missing):
            load("beir", str(folder))
        (folder / "away").rename(folder / missing)


def test_broken_qrels_and_unknown_queries_are_problems(folder):
    (folder / "qrels" / "test.tsv").write_text("q2 d2 1\nq9\td1\t1\n")
    with pytest.raises(DataError, match=r"(?s)2 bad records.*test\.tsv:1: 'q2 d2 1'.*'q9' in qrels/ is not in queries"):
        load("beir", str(folder))
    assert load("beir", str(folder), skip_invalid=True).tasks.skipped == {
        "broken qrels": 1,
        "no such query": 1,
        "query without a score above 0": 1,
    }
