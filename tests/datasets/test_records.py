import bz2
import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from leret.core.errors import DataError
from leret.datasets import records as module
from leret.datasets.records import Problems, open_compressed, records
from tests.datasets.writing import DOCUMENTS, array, json_lines, load_tasks

_GOOD = b'{"id": "q1", "question": "Who?", "relevant_doc_ids": ["A"]}\n'
_MANY = b"".join(
    b'{"id": "q%d", "question": "Who was the %dth?", "relevant_doc_ids": ["A"]}\n' % (i, i * i) for i in range(2000)
)


def zstd(data):
    return pyarrow.compress(data, "zstd", asbytes=True)


COMPRESS = [bytes, bz2.compress, gzip.compress, zstd]


def read(path):
    problems = Problems()
    found = [record.value for record in records(Path(path), problems)]
    assert problems.shown == []
    return found


@pytest.mark.parametrize("compress", COMPRESS)
def test_lines_and_arrays_may_be_compressed(tmp_path, compress):
    path = tmp_path / "a"  # told by the first bytes, not by the name
    for indent in (None, 0, 2):
        _ = json_lines(path, DOCUMENTS) if indent is None else array(path, DOCUMENTS, indent)
        data = path.read_bytes()
        path.write_bytes(compress(data[:99]) + compress(data[99:]))  # two members
        assert read(path) == DOCUMENTS


@pytest.mark.parametrize("compress", [bytes, zstd])
@pytest.mark.parametrize(("name", "delimiter"), [("q.csv", ","), ("q.CSV.gz", ";")])
def test_csv_rows_are_read_by_their_header(tmp_path, name, delimiter, compress):
    text = '\ufeffid|text|hops\r\nq1|"Who, ""really""?\r\nHe|"| \r\n\r\nq2|Caf\u00e9|2\r\n'.replace("|", delimiter)
    (tmp_path / name).write_bytes(compress(text.encode()))
    assert read(tmp_path / name) == [
        {"id": "q1", "text": f'Who, "really"?\r\nHe{delimiter}', "hops": " "},
        {"id": "q2", "text": "Caf\u00e9", "hops": "2"},
    ]


def test_parquet_rows_are_read_with_their_types(tmp_path):
    rows = [{"id": 1, "ids": ["a", "b"], "hops": None}, {"id": 2, "ids": [], "hops": 3}]
    path = tmp_path / "q"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read(path) == rows
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="row 1 cannot be read"):
        read(path)


def test_big_arrays_are_not_held_in_memory(tmp_path):
    path = tmp_path / "big.json"
    path.write_text("[" + ",".join([json.dumps({"text": "x" * 2000})] * 4000) + "]")  # 8 MB
    tracemalloc.start()
    assert sum(1 for _ in records(path, Problems())) == 4000
    assert tracemalloc.get_traced_memory()[1] < 3_000_000  # the peak
    tracemalloc.stop()


def test_missing_files_are_refused_and_a_file_cut_short_counts_as_one_skipped_record(tmp_path):
    for path, says in ((tmp_path, "is a directory"), (tmp_path / "file", "no such file")):
        with pytest.raises(DataError, match=says):
            load_tasks("jsonl", str(path))
    (tmp_path / "q.gz").write_bytes(gzip.compress(_MANY)[:-400])
    loaded = load_tasks("jsonl", str(tmp_path / "q.gz"), skip_invalid=True)
    assert (loaded.skipped, 0 < len(loaded) < 2000) == ({"truncated": 1}, True)


def test_equal_faults_are_counted_and_ten_different_ones_shown(tmp_path):
    path = tmp_path / "q"
    path.write_bytes(b"nonsense\n" * 25 + _GOOD)
    with pytest.raises(DataError) as caught:
        load_tasks("jsonl", str(path))
    assert "25 bad records\n" in str(caught.value)
    assert str(caught.value).count("broken JSON") == 1
    assert f"{path}:1: broken JSON" in str(caught.value)
    assert "(25 records: also 2, 3, 4 ...)\nfix them, or skip" in str(caught.value)
    path.write_bytes(b"".join(b"nonsense%d\n" % (i % 13) for i in range(26)))
    with pytest.raises(DataError, match=r"more\nfix them$") as caught:  # nothing would be left to read
        load_tasks("jsonl", str(path))
    assert str(caught.value).count("(2 records: also") == 10
    assert "and 6 more" in str(caught.value)


@pytest.mark.parametrize("compress", COMPRESS)
def test_small_files_that_grow_are_read_in_pieces(compress, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_RECORD", 1 << 20)
    (tmp_path / "bomb").write_bytes(compress(b"\x01" * (8 << 20)))
    with open_compressed(tmp_path / "bomb") as file:
        assert len(file.read(1 << 20)) == 1 << 20
    with pytest.raises(DataError, match="a line is longer than 1 MiB"):
        load_tasks("jsonl", str(tmp_path / "bomb"))
