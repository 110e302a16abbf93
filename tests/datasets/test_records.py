"""JSON objects out of files: lines and arrays, plain and compressed, in pieces of any size."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leret.core.errors import DataError
from leret.datasets import records as lines_module
from leret.datasets.records import Problems, records
from tests.datasets.writing import DOCUMENTS, array, compressed, json_lines


def _read(path: Path) -> list[Any]:
    problems = Problems()
    found = [record.value for record in records(path, problems)]
    assert problems.shown == []
    return found


def test_lines_and_arrays_hold_the_same(tmp_path: Path) -> None:
    for path in (
        json_lines(tmp_path / "a", DOCUMENTS),
        array(tmp_path / "b", DOCUMENTS),
        array(tmp_path / "c", DOCUMENTS, 2),
    ):
        assert _read(Path(path)) == DOCUMENTS


def test_compressed_copies_hold_the_same_whatever_their_name(tmp_path: Path) -> None:
    for source in (json_lines(tmp_path / "a", DOCUMENTS), array(tmp_path / "b", DOCUMENTS)):
        for copy in compressed(Path(source)).values():
            assert _read(copy) == DOCUMENTS


def test_byte_order_mark_crlf_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  {"a": 2}\r\n')
    assert _read(path) == [{"a": 1}, {"a": 2}]


def test_places_name_file_and_line_or_item(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [record.place for record in records(path, Problems())] == [f"{path}:1", f"{path}:3"]
    made = Path(array(tmp_path / "b.json", [{"a": 1}, {"a": 2}], 1))
    assert [record.place for record in records(made, Problems())] == [
        f"{made}: item 1 (line 2)",
        f"{made}: item 2 (line 5)",
    ]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.dictionaries(st.text(), _JSON, max_size=3), max_size=5),
    size=st.integers(3, 40),
    ascii=st.booleans(),
)
def test_an_array_reads_the_same_in_pieces_of_any_size(
    values: list[dict[str, Any]], size: int, ascii: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("a") / "a.json"
    path.write_bytes(json.dumps(values, ensure_ascii=ascii).encode("utf-8", "replace"))
    expected = json.loads(path.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "_CHUNK", size)
        assert _read(path) == expected


def test_a_big_array_is_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    item = json.dumps({"text": "x" * 2000})
    path.write_text("[" + ",".join([item] * 10_000) + "]")  # 20 MB
    tracemalloc.start()
    n = sum(1 for _ in records(path, Problems()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n == 10_000
    assert peak < 4_000_000


@pytest.mark.parametrize(
    ("content", "match"),
    [
        pytest.param(b'[{"a": 1}, {"a": tru}]', r"item 2, line 1: .*broken JSON", id="broken-item"),
        pytest.param(b'[{"a": 1}\n {"a": 2}]', "after item 1, line 2: a comma or ] is missing", id="no-comma"),
        pytest.param(b'[{"a": 1}, {"a": "x', "cut off", id="cut-off-in-a-string"),
        pytest.param(b'[{"a": 1},', "no end", id="cut-off-between-items"),
        pytest.param(b'[{"a": "\xff"}]', "not UTF-8", id="not-utf8"),
        pytest.param(b"[" * 100_000, "cannot be read", id="nested-too-deep"),
        pytest.param(b"  \n ", "blank", id="blank"),
        pytest.param(b"", "is empty", id="empty"),
        pytest.param("[1]".encode("utf-16"), "is UTF-16; save it as UTF-8", id="utf16"),
    ],
)
def test_a_broken_array_is_one_clear_error(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=match):
        list(records(path, Problems()))


def test_items_that_are_no_objects_are_problems(tmp_path: Path) -> None:
    problems = Problems()
    assert [record.value for record in records(Path(array(tmp_path / "a", [1, {"a": 2}, "x"])), problems)] == [{"a": 2}]
    assert problems.kinds == {"not an object": 2}
