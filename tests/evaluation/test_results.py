from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leret.core.errors import RunError
from leret.evaluation.results import ScoredHop, escape, read_rows, write_rows


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "s" / "p.parquet"
    found = ("bridge", 0, 1, "a query", None, ("d1", "d2"), (2.0, 1.0))
    two = [ScoredHop("q1", *found, {"recall": 0.5}, 2), ScoredHop("q2", *found, {}, failure="policy: down")]
    for rows in (two, []):
        write_rows(path, rows, ["recall"])
        assert (read_rows(path), list(path.parent.iterdir())) == (rows, [path])
    write_rows(path, [ScoredHop("q", None, 0, 1, "\ud800", "a\ud800", (), (), {})], [])
    assert read_rows(path)[0].completion == "a?"
    pq.write_table(pq.read_table(path).drop_columns("lm_calls"), path)
    with pytest.raises(RunError, match=r"'lm_calls' is missing: an older leret.* delete"):
        read_rows(path)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(RunError, match=r"delete .* and run `leret eval` again"):
        read_rows(path)


@given(st.text(alphabet=st.characters(), min_size=1))
def test_escaping_is_reversible_and_leaves_no_white_space(text):
    assert unquote(escape(text), errors="surrogatepass") == text
    assert escape(text).split() == [escape(text)]
    assert escape("Zoë_(singer)-1+2") == "Zoë_(singer)-1+2"
