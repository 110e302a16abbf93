"""The table of a system's results, on disk and as arrays."""

import numpy as np
import pytest
from leret.evaluation.scores import n_hops, score_table

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


def test_a_question_that_ends_early_keeps_its_last_ranking():
    values = score_table([row("q", 1, 0.5)], ["q"], 3, ["recall"]).values
    assert values[:, :, 0].tolist() == [[0.5, 0.5, 0.5]]


def test_a_failed_question_is_counted_and_not_scored():
    scores = score_table(
        [row("a", 1, 0.5), row("b", 1, 0.0), row("b", 2, None, failure="x")], ["a", "b"], 1, ["recall"]
    )
    assert (scores.n_failed, scores.n_unparsed) == (1, 0)
    assert np.isnan(scores.values[1]).all()


def test_an_unparsed_completion_is_scored_with_what_was_found_before():
    scores = score_table([row("a", 1, 0.0, unparsed=True)], ["a"], 2, ["recall"])
    assert (scores.n_failed, scores.n_unparsed) == (0, 1)
    assert scores.values[0, 1, 0] == 0.0


def test_several_runs_of_a_question_are_averaged_and_a_failed_one_is_left_out():
    rows = [row("a", 1, 1.0), row("a", 1, 0.5, sample=1), row("a", 1, None, sample=2, failure="x")]
    assert score_table(rows, ["a"], 1, ["recall"]).values[0, 0, 0] == 0.75


def test_a_measure_without_a_value_on_a_question_is_no_number():
    assert np.isnan(score_table([row("a", 1, 0.5)], ["a"], 1, ["bridge_found"]).values).all()


def test_hops_are_counted_over_runs_that_ended():
    assert n_hops([row("a", 2, 0.5), row("b", 7, None, failure="x")]) == 2
    assert n_hops([]) == 1
