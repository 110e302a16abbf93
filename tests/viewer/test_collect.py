import shutil
from contextlib import closing

import pytest

from leret.core.errors import RunError
from leret.viewer.collect import collect
from leret.viewer.index import RunIndex


def test_rewards_and_margins_have_histograms_and_cut_completions_are_counted(index):
    def bars(name):
        sql = "SELECT step, bin, n, share, mean FROM bars WHERE name = ? ORDER BY step, bin"
        return [tuple(row) for row in index.read(sql, (name,))]

    # step 1: rewards 1, .5, .5, .5 (sft) and two of 0; step 2: 1 and 0
    first = [(1, 0, 2, 2 / 6, 2.5 / 6), (1, 5, 3, 0.5, 2.5 / 6), (1, 9, 1, 1 / 6, 2.5 / 6)]
    assert bars("Rewards") == [*map(pytest.approx, first), (2, 0, 1, 0.5, 0.5), (2, 9, 1, 0.5, 0.5)]
    assert [row[:3] for row in bars("Margins")] == [(1, 5, 1), (2, 9, 1)]
    assert index.read("SELECT * FROM cuts") == []


def test_a_part_that_cannot_be_read_is_a_note(run, tmp_path):
    (tmp_path / "questions.jsonl").unlink()
    collect(run, tmp_path / "facts.db")
    index = RunIndex(run, tmp_path / "i.db")
    index.use(tmp_path / "facts.db")
    [[note]] = index.read("SELECT text FROM notes")
    assert note.startswith("questions and gold documents: ")
    assert "questions.jsonl" in note
    assert index.one("SELECT count(*) FROM ends") == 2


def test_a_run_without_stored_samples_has_its_results(run, tmp_path):
    run.store.unlink()
    with closing(RunIndex(run, tmp_path / "i.db")) as index:
        collect(run, tmp_path / "facts.db")
        index.use(tmp_path / "facts.db")
        assert index.read("SELECT text FROM notes") == []
        assert index.one("SELECT count(*) FROM ends") == 2
    assert not run.store.exists()
    shutil.rmtree(run.policies)
    shutil.rmtree(run.eval)
    with pytest.raises(RunError, match="run `leret sample RECIPE"):
        RunIndex(run, tmp_path / "j.db")
