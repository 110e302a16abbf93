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


_GZIP, _ZSTD = gzip.compress(_MANY), zstd(_MANY)
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


@pytest.mark.parametrize("compress", COMPRESS)
@pytest.mark.parametrize(("name", "delimiter"), [("q.csv", ","), ("q.CSV", ";"), ("q.csv.gz", "\t")])
def test_csv_rows_are_read_by_their_header(tmp_path, name, delimiter, compress):
    text = '\ufeffid|text|hops\r\nq1|"Who, ""really""?\r\nHe|"| \r\n\r\nq2|Caf\u00e9|2\r\n'.replace("|", delimiter)
    (tmp_path / name).write_bytes(compress(text.encode()))
    assert read(tmp_path / name) == [
        {"id": "q1", "text": f'Who, "really"?\r\nHe{delimiter}', "hops": " "},
        {"id": "q2", "text": "Caf\u00e9", "hops": "2"},
    ]


def test_bad_rows_of_a_csv_file_are_counted_by_their_first_line(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text('id,question,relevant_doc_ids\n1,"Who\n?",A\n2,What, then?,A\n3,Where?,A\n4,"broken,A\n')
    problems = Problems()
    rows = [(row.place.rpartition(":")[2], row.value["id"]) for row in records(path, problems)]
    assert rows == [("2", "1"), ("5", "3")]
    assert [line.removeprefix(f"{path}:")[:10] for line in problems.shown] == ["4: 4 cells", "6: broken "]
    path.write_bytes(b"id,question\n1,caf\xe9\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read(path)


def test_parquet_rows_are_read_with_their_types(tmp_path):
    rows = [{"id": 1, "ids": ["a", "b"], "hops": None}, {"id": 2, "ids": [], "hops": 3}]
    path = tmp_path / "q"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read(path) == rows
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="row 1 cannot be read"):
        read(path)


def test_byte_order_mark_crlf_and_blank_lines_are_skipped(tmp_path):
    for content in (b'\xef\xbb\xbf{"a": 1}\r\n\r\n  {"a": 2}\r\n', b'\xef\xbb\xbf \n[{"a": 1},\n{"a": 2}]'):
        (tmp_path / "q").write_bytes(content)
        assert read(tmp_path / "q") == [{"a": 1}, {"a": 2}]


_ITEM = {"": None, 'é\n"': [True, 1 - 2**63, 2**63 - 1, 1.5e-30, [], {}, [[{"x": "\u2028"}]]], "b": {"c": {"d": "]}"}}}


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("values", [[], [{}], [_ITEM, {}, _ITEM]])
def test_arrays_are_read_as_json_reads_them(values, ascii, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(values, ensure_ascii=ascii), encoding="utf-8")
    assert read(tmp_path / "a.json") == values


def test_big_arrays_are_not_held_in_memory(tmp_path):
    path = tmp_path / "big.json"
    path.write_text("[" + ",".join([json.dumps({"text": "x" * 2000})] * 10_000) + "]")  # 20 MB
    tracemalloc.start()
    assert sum(1 for _ in records(path, Problems())) == 10_000
    assert tracemalloc.get_traced_memory()[1] < 4_000_000  # the peak
    tracemalloc.stop()


FILES = {
    "cut off in a string": (b'[{"a": 1}, {"a": "x', "item 2: broken JSON"),
    "objects nested too deep": (b'[{"a":' + b'{"a":' * 100_000, "nested more than 200 deep"),
    "line nested too deep": (_GOOD + b'{"a": ' + b"[" * 100_000, ":2: broken JSON"),
    "empty": (b"", "is empty"),
    "gzip cut short": (_GZIP[:-400], "ends early"),
    "broken gzip": (_GZIP[:300] + b"x" * 99 + _GZIP[399:], "compressed file is broken"),
}


@pytest.mark.parametrize(("content", "says"), FILES.values(), ids=FILES)
def test_bad_files_are_refused_with_their_place(content, says, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){tmp_path}/file.*{says}"):
        load_tasks("jsonl", str(tmp_path / "file"))


def test_missing_file_and_directory_are_refused(tmp_path):
    for path, says in ((tmp_path, "is a directory"), (tmp_path / "file", "no such file")):
        with pytest.raises(DataError, match=says):
            load_tasks("jsonl", str(path))


def test_a_file_cut_short_counts_as_one_skipped_record(tmp_path):
    (tmp_path / "q.gz").write_bytes(_GZIP[:-400])
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
    (tmp_path / "bomb").write_bytes(compress(b"\x01" * (40 << 20)))
    with open_compressed(tmp_path / "bomb") as file:
        assert len(file.read(1 << 20)) == 1 << 20
    with pytest.raises(DataError, match="a line is longer than 1 MiB"):
        load_tasks("jsonl", str(tmp_path / "bomb"))
