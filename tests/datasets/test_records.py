"""JSON objects out of files: lines and arrays, plain and compressed; and what is wrong with a file."""

from __future__ import annotations

import bz2
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from leret.core.errors import DataError
from leret.datasets import records as module
from leret.datasets.records import Problems, opened, records
from tests.datasets.writing import DOCUMENTS, array, compressed, json_lines, load_tasks

_GOOD = b'{"id": "q1", "question": "Who?", "relevant_doc_ids": ["A"]}\n'
_MANY = b"".join(
    b'{"id": "q%d", "question": "Who was the %dth?", "relevant_doc_ids": ["A"]}\n' % (i, i * i) for i in range(2000)
)
_GZIP, _ZSTD = gzip.compress(_MANY), zstandard.ZstdCompressor().compress(_MANY)


def read(path: Path | str) -> list[Any]:
    problems = Problems()
    found = [record.value for record in records(Path(path), problems)]
    assert problems.shown == []
    return found


def test_lines_and_arrays_compressed_or_not_hold_the_same(tmp_path: Path) -> None:
    for i, path in enumerate(
        (json_lines(tmp_path / "a", DOCUMENTS), array(tmp_path / "b", DOCUMENTS), array(tmp_path / "c", DOCUMENTS, 2))
    ):
        assert read(path) == DOCUMENTS, i
        for copy in compressed(Path(path)).values():  # told by the first bytes, not by the name
            assert read(copy) == DOCUMENTS


def test_byte_order_mark_crlf_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    for content in (b'\xef\xbb\xbf{"a": 1}\r\n\r\n  {"a": 2}\r\n', b'\xef\xbb\xbf \n[{"a": 1},\n{"a": 2}]'):
        (tmp_path / "q").write_bytes(content)
        assert read(tmp_path / "q") == [{"a": 1}, {"a": 2}]


def test_places_name_file_and_line_or_item(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [record.place for record in records(tmp_path / "a", Problems())] == [f"{tmp_path}/a:1", f"{tmp_path}/a:3"]
    made = Path(array(tmp_path / "b", [{"a": 1}, {"a": 2}], 1))
    assert [record.place for record in records(made, Problems())] == [f"{made}: item 1", f"{made}: item 2"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(1 - 2**63, 2**63 - 1) | st.text() | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=40)
@given(values=st.lists(st.dictionaries(st.text(), _JSON, max_size=3), max_size=5), ascii=st.booleans())
def test_arrays_are_read_as_json_reads_them(
    values: list[dict[str, Any]], ascii: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("a") / "a.json"
    text = json.dumps(values, ensure_ascii=ascii).replace("Infinity", "1e38").replace("-1e38", "1e38")
    path.write_text(text, encoding="utf-8")
    assert read(path) == json.loads(text)


def test_big_arrays_are_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    path.write_text("[" + ",".join([json.dumps({"text": "x" * 2000})] * 10_000) + "]")  # 20 MB
    tracemalloc.start()
    n = sum(1 for _ in records(path, Problems()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n == 10_000
    assert peak < 4_000_000


def test_items_that_are_no_objects_are_problems(tmp_path: Path) -> None:
    problems = Problems()
    assert [record.value for record in records(Path(array(tmp_path / "a", [1, {"a": 2}, "x"])), problems)] == [{"a": 2}]
    assert problems.kinds == {"not an object": 2}


FILES: dict[str, tuple[bytes, str]] = {
    "broken item": (b'[{"a": 1}, {"a": tru}]', "item 2: broken JSON"),
    "no comma": (b'[{"a": 1}\n {"a": 2}]', "item 2: broken JSON"),
    "cut off in a string": (b'[{"a": 1}, {"a": "x', "item 2: broken JSON"),
    "cut off between items": (b'[{"a": 1},', "item 2: broken JSON"),
    "array not UTF-8": (b'[{"a": "\xff"}]', "invalid bytes in UTF8"),
    "array nested too deep": (b"[" * 100_000, "nested too deeply"),
    "objects nested too deep": (b'[{"a":' + b'{"a":' * 100_000, "nested too deeply"),
    "line nested too deep": (_GOOD + b'{"a": ' + b"[" * 100_000, ":2: JSON that cannot be read"),
    "line is broken": (_GOOD + b'{"id": "q2", "question": "Wh\n', r":2: broken JSON \(Unterminated string .* column"),
    "line is a list": (_GOOD + b"[1, 2]\n", ":2: list where a JSON object should be"),
    "line not UTF-8": (_GOOD + b'{"id": "\xff"}\n', ":2: not UTF-8 at byte 8"),
    "UTF-16": (_GOOD.decode().encode("utf-16"), "is UTF-16"),
    "empty": (b"", "is empty"),
    "blank": (b"\n \n", "is blank"),
    "empty gzip": (gzip.compress(b""), "is empty"),
    "gzip cut short": (_GZIP[:-400], "ends early"),
    "array in a gzip cut short": (gzip.compress(b"[" + b"{},\n" * 99999)[:-20], "ends early"),
    "broken gzip": (_GZIP[:300] + b"x" * 99 + _GZIP[399:], "compressed file is broken"),
    "zstd cut short": (_ZSTD[:-9], "ends early"),
    "broken zstd": (b"\x28\xb5\x2f\xfd" + b"nonsense" * 9, "compressed file is broken"),
}


@pytest.mark.parametrize("kind", FILES)
def test_bad_files_are_refused_with_their_place(kind: str, tmp_path: Path) -> None:
    content, says = FILES[kind]
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        load_tasks("jsonl", str(tmp_path / "file"))
    assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.parametrize(("make", "says"), [(Path.mkdir, "is a directory"), (lambda path: None, "no such file")])
def test_what_is_no_file_is_refused(make: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    make(tmp_path / "file")
    with pytest.raises(DataError, match=says):
        load_tasks("jsonl", str(tmp_path / "file"))


def test_a_file_cut_short_counts_as_one_skipped_record(tmp_path: Path) -> None:
    (tmp_path / "q.gz").write_bytes(_GZIP[:-400])
    loaded = load_tasks("jsonl", str(tmp_path / "q.gz"), skip_invalid=True)
    assert loaded.skipped == {"truncated": 1}
    assert 0 < len(loaded) < 2000


def test_faults_come_in_one_error_up_to_twenty(tmp_path: Path) -> None:
    path = tmp_path / "q"
    path.write_bytes(b"nonsense\n" * 25 + _GOOD)
    with pytest.raises(DataError) as caught:
        load_tasks("jsonl", str(path))
    for words in ("25 bad records", f"{path}:20: broken JSON", "and 5 more", "--skip-invalid"):
        assert words in str(caught.value)
    assert ":21:" not in str(caught.value)
    path.write_bytes(b"nonsense\n" * 25)
    with pytest.raises(DataError) as caught:
        load_tasks("jsonl", str(path))
    assert "--skip-invalid" not in str(caught.value)  # nothing would be left


@pytest.mark.parametrize("compress", [bytes, bz2.compress, gzip.compress, zstandard.compress])
def test_small_files_that_grow_are_read_in_pieces(
    compress: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RECORD", 1 << 20)
    (tmp_path / "bomb").write_bytes(compress(b"\x01" * (40 << 20)))
    with opened(tmp_path / "bomb") as file:
        assert len(file.read(1 << 20)) == 1 << 20
    with pytest.raises(DataError, match="a line is longer than 1 MiB"):
        load_tasks("jsonl", str(tmp_path / "bomb"))
