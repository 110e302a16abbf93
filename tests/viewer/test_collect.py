import shutil
from contextlib import closing

import pytest

from leret.core.errors import RunError
from leret.viewer.collect import collect
from leret.viewer.index import RunIndex


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
