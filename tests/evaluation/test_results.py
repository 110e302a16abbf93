import json
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leret.core.errors import RunError
from leret.core.types import Task
from leret.evaluation.results import ScoredHop, escape, read_rows, write_answers, write_rows


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
    with pytest.raises(RunError, match=r"'lm_calls'.* delete"):
        read_rows(path)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(RunError, match=r"delete .* and run `leret eval` again"):
        read_rows(path)


@given(st.text(alphabet=st.characters(), min_size=1))
def test_escaping_is_reversible_and_leaves_no_white_space(text):
    assert unquote(escape(text), errors="surrogatepass") == text
    assert escape(text).split() == [escape(text)]
    assert escape("Zoë_(singer)-1+2") == "Zoë_(singer)-1+2"


def test_answers_are_kept_with_all_that_a_reader_needs(tmp_path):
    def row(question, hop, prediction=None, **more):
        return ScoredHop(question, None, more.pop("sample", 0), hop, "x", "x", ("d1",), (1.0,), {}, **more,
                         prediction=prediction)  # fmt: skip

    tasks = {name: Task(name, {"persona": "p", "turns": ["hi"]}, answers=("yes",)) for name in ("a", "b", "c", "d")}
    rows = [row("a", 1), row("a", 2, '{"answer": "é", "why": "x"}', picked=("s1",)), row("a", 1, '"bare"', sample=1)]
    rows += [row("b", 1, '{"reply": "r", "why": "x"}'), row("c", 1, unparsed=True), row("d", 1, failure="policy: down")]
    write_answers(tmp_path / "answers.jsonl", tasks, rows)
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    known = {"inputs": {"persona": "p", "turns": ["hi"]}, "references": ["yes"], "found": ["d1"]}
    assert lines == [
        {"id": "a", **known, "prediction": "é", "picked": ["s1"]},
        {"id": "a", **known, "prediction": "bare", "sample": 1},
        {"id": "b", **known, "prediction": {"reply": "r", "why": "x"}},
        {"id": "c", **known, "prediction": "", "unparsed": True},
        {"id": "d", **known, "prediction": None, "failure": "policy: down"},
    ]
    write_answers(tmp_path / "none.jsonl", tasks, [row("a", 1), row("c", 1, unparsed=True)])
    assert not (tmp_path / "none.jsonl").exists()  # the program only searches
