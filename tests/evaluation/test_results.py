"""The files of a system's results: its table, and TREC's."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leret.core.errors import RunError
from leret.evaluation.results import ScoredHop, escape, read_rows, write_rows, write_run


def row(question, hop, recall, sample=0, **more):
    measures = {} if recall is None else {"recall": recall}
    return ScoredHop(question, "bridge", sample, hop, "a query", None, ("d1", "d2"), (2.0, 1.0), measures, **more)


def test_rows_survive_the_file(tmp_path):
    rows = [row("q1", 1, 0.5), row("q1", 2, 1.0), row("q2", 1, None, failure="PolicyError: the server is down")]
    for some in (rows, []):
        write_rows(tmp_path / "s" / "p.parquet", some, ["recall"])
        assert read_rows(tmp_path / "s" / "p.parquet") == some
        assert [path.name for path in (tmp_path / "s").iterdir()] == ["p.parquet"]
    write_rows(tmp_path / "p.parquet", [ScoredHop("q", None, 0, 1, "\ud800", "a\ud800", (), (), {})], [])
    assert read_rows(tmp_path / "p.parquet")[0].completion == "a?"


def test_a_damaged_file_says_what_to_do(tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(RunError, match=r"delete .* and run `leret eval` again"):
        read_rows(tmp_path / "p.parquet")


@given(st.text(alphabet=st.characters(), min_size=1))
def test_escaping_is_reversible_and_leaves_no_white_space(text):
    assert unquote(escape(text), errors="surrogatepass") == text
    assert escape(text).split() == [escape(text)]
    assert escape("Zoë_(singer)-1+2") == "Zoë_(singer)-1+2"


def test_ties_and_order_of_a_run_are_written_as_falling_scores(tmp_path):
    write_run(tmp_path / "r", "t", [("q", ["b", "a", "c"], [1.0, 1.0, 2.0])])
    scores = [float(line.split()[4]) for line in (tmp_path / "r").read_text().splitlines()]
    assert scores[0] > scores[1] > scores[2]
    assert scores == pytest.approx([1.0, 1.0, 1.0], abs=1e-6)
