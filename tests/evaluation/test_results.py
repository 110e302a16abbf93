"""The file of a system's results."""

import pytest

from leret.core.errors import RunError
from leret.evaluation.results import ScoredHop, read_rows, write_rows


def row(question, hop, recall, sample=0, **more):
    measures = {} if recall is None else {"recall": recall}
    return ScoredHop(question, "bridge", sample, hop, "a query", None, ("d1", "d2"), (2.0, 1.0), measures, **more)


def test_rows_survive_the_file(tmp_path):
    rows = [row("q1", 1, 0.5), row("q1", 2, 1.0), row("q2", 1, None, failure="PolicyError: the server is down")]
    write_rows(tmp_path / "s" / "p.parquet", rows, ["recall"])
    assert read_rows(tmp_path / "s" / "p.parquet") == rows
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["p.parquet"]


def test_an_empty_system_has_a_file(tmp_path):
    write_rows(tmp_path / "p.parquet", [], ["recall"])
    assert read_rows(tmp_path / "p.parquet") == []


def test_text_that_is_not_unicode_is_written(tmp_path):
    bad = ScoredHop("q", None, 0, 1, "\ud800", "a\ud800", (), (), {})
    write_rows(tmp_path / "p.parquet", [bad], [])
    assert read_rows(tmp_path / "p.parquet")[0].completion == "a?"


def test_a_damaged_file_says_what_to_do(tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(RunError, match=r"delete .* and run `leret eval` again"):
        read_rows(tmp_path / "p.parquet")
