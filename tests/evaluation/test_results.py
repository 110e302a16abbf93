"""The files of a system's results: its table, and TREC's."""

from __future__ import annotations

from collections import defaultdict
from urllib.parse import unquote

import ir_measures
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leret.core.errors import RunError
from leret.core.types import Task
from leret.evaluation.results import ScoredHop, escape, read_rows, write_qrels, write_rows, write_run


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


@given(st.text(alphabet=st.characters(), min_size=1))
def test_escaping_is_reversible_and_leaves_no_white_space(text):
    assert unquote(escape(text), errors="surrogatepass") == text
    assert escape(text).split() == [escape(text)]


def test_plain_ids_stay_as_they_are():
    assert escape("Zoë_(singer)-1+2") == "Zoë_(singer)-1+2"


def test_ir_measures_finds_the_same_measures(tmp_path):
    rng = np.random.default_rng(0)
    documents = [f"Some Title {i} (50%)" for i in range(30)]
    questions, rankings = [], []
    for i in range(200):
        order = rng.permutation(30)[: rng.integers(0, 7)]
        scores = sorted(rng.integers(0, 4, len(order)) + 0.0, reverse=True)
        gold = tuple(documents[j] for j in rng.permutation(30)[: rng.integers(1, 4)])
        questions.append(Task.question(f"q {i}", "?", gold=gold))
        rankings.append((f"q {i}", [documents[j] for j in order], scores))
    write_run(tmp_path / "run.trec", "a system", rankings)
    write_qrels(tmp_path / "qrels.trec", questions)
    theirs = defaultdict(dict)
    measures = [ir_measures.AP, ir_measures.R @ 1000]
    qrels = list(ir_measures.read_trec_qrels(str(tmp_path / "qrels.trec")))
    run = list(ir_measures.read_trec_run(str(tmp_path / "run.trec")))
    for metric in ir_measures.iter_calc(measures, qrels, run):
        theirs[unquote(metric.query_id, errors="surrogatepass")][str(metric.measure)] = metric.value
    for question, (_, ranked, _) in zip(questions, rankings, strict=True):
        hits = [1.0 if d in question.gold else 0.0 for d in ranked]
        ap = sum(h * sum(hits[: r + 1]) / (r + 1) for r, h in enumerate(hits)) / len(question.gold)
        assert theirs[question.id]["AP"] == pytest.approx(ap, abs=1e-12)
        assert theirs[question.id]["R@1000"] == pytest.approx(sum(hits) / len(question.gold), abs=1e-12)


def test_ties_and_order_of_a_run_are_written_as_falling_scores(tmp_path):
    write_run(tmp_path / "r", "t", [("q", ["b", "a", "c"], [1.0, 1.0, 2.0])])
    scores = [float(line.split()[4]) for line in (tmp_path / "r").read_text().splitlines()]
    assert scores[0] > scores[1] > scores[2]
    assert scores == pytest.approx([1.0, 1.0, 1.0], abs=1e-6)


def test_a_gold_document_named_twice_is_one_line(tmp_path):
    write_qrels(tmp_path / "q", [Task.question("q", "?", gold=("d", "d"))])
    assert (tmp_path / "q").read_text() == "q 0 d 1\n"
