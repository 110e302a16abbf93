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
    assert data.tasks.skipped == {"query judged in an earlier split": 1, "query without a score above 0": 1}
    assert len(data.corpus) == 4
    for path in (str(folder), f"{folder}/corpus.jsonl"):
        assert load("beir", str(folder), path).corpus.digest == data.corpus.digest


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


TREC = "q0 0 d0 1\nq1 0 d1 3\nq1 0 d2 0\nq2 Q0 d3 -2\n"
READ = {
    "TREC": TREC,
    "TREC with a header": "query-id\t0\tcorpus-id\tscore\n" + TREC.replace(" ", "\t"),
    "BEIR with CRLF and a byte order mark": "\ufeffquery-id\tcorpus-id\tscore\r\nq0\td0\t1\r\nq1\td1\t3\r\n",
    "BEIR without a header": "q0\td0\t1\nq1\td1\t3\nq2\t0\t0\n",
}


@pytest.mark.parametrize("text", READ.values(), ids=READ)
def test_qrels_of_both_formats_are_read(folder, text):
    (folder / "qrels" / "train.tsv").write_text(text, encoding="utf-8")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq3\td3\t1\n")
    tasks = load("beir", str(folder)).tasks.items
    assert [(task.id, task.grades, task.split) for task in tasks] == [
        ("q0", {"d0": 1}, "train"), ("q1", {"d1": 3}, "train"), ("q3", {"d3": 1}, "test")]  # fmt: skip


REFUSED = {  # text, the number of the bad line
    "a TREC run": ("q0 Q0 d0 1 9.5 bm25\n", 1),
    "two widths": ("q0\td0\t1\nq1\t0\td1\t1\n", 2),
    "a blank score": ("q0\td0\t1\nq0\td1\t\n", 2),
    "two scores of a judgement": ("q0\td0\t1\nq0\td0\t2\n", 2),
    "not UTF-8": (b"q0\td0\t1\nq\xff\td0\t2\n", 2),
}  # fmt: skip


@pytest.mark.parametrize(("text", "line"), REFUSED.values(), ids=REFUSED)
def test_other_qrels_are_refused_with_their_line(folder, text, line):
    (folder / "qrels" / "train.tsv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=rf"qrels/train\.tsv:{line}: "):
        load("beir", str(folder))


@pytest.mark.parametrize("name", ["train.old.tsv", "all.tsv"])
def test_files_that_are_not_splits_are_not_read_but_named(folder, name):
    (folder / "qrels" / name).write_text("q3\td3\t1\n")
    tasks = load("beir", str(folder)).tasks
    assert [task.id for task in tasks] == ["q0", "q2"]
    assert [n for kind, n in tasks.skipped.items() if name in kind] == [1]


@pytest.mark.parametrize(
    ("name", "copy"),
    [("qrels/test.tsv", "qrels/test.tsv.gz"), ("qrels/train.tsv", "qrels/training.tsv"),
     ("corpus.jsonl", "corpus.jsonl.gz"), ("queries.jsonl", "queries.jsonl.zst")],
)  # fmt: skip
def test_two_files_of_one_part_are_refused(folder, name, copy):
    (folder / copy).write_bytes((folder / name).read_bytes())
    with pytest.raises(DataError, match=f"{name} and {copy.partition('/')[2] or copy}"):
        load("beir", str(folder))
