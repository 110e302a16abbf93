"""The run directory: made once, read by version, moved with its files, updated by several processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from leret.core.errors import RunError
from leret.core.runs import Run


def test_a_run_is_made_in_an_empty_directory_and_found_again(tmp_path):
    run = Run.create(tmp_path / "a" / "run")
    run.update(sampling={"k": 3})
    assert Run.create(run.path).section("sampling", "leret sample") == {"k": 3}
    assert "python" in Run.open(run.path).manifest()["versions"]
    with pytest.raises(RunError, match="no training yet; run `leret train"):
        run.section("training", "leret train")


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(RunError, match="not empty and is not a run"):
        Run.create(tmp_path / "other")
    with pytest.raises(RunError, match="is a file"):
        Run.create(tmp_path / "other" / "notes.txt")
    with pytest.raises(RunError, match="no run"):
        Run.open(tmp_path / "missing")


@pytest.mark.parametrize("text", ["schema: 1\n", "{", "", "[]"])
def test_a_manifest_of_another_version_or_damaged_is_refused(tmp_path, text):
    run = Run.create(tmp_path / "run")
    run.manifest_path.write_text(text)
    with pytest.raises(RunError):
        Run.open(run.path)


def test_a_run_moves_with_the_files_that_it_names(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "corpus.jsonl").touch()
    run = Run.create(tmp_path / "here" / "run")
    run.update(sampling={"data": [str(tmp_path / "here" / "corpus.jsonl")]})
    assert run.record()["sampling"] == {"data": ["$RUN/../corpus.jsonl"]}
    moved = Run((tmp_path / "here").rename(tmp_path / "there") / "run")
    assert moved.manifest()["sampling"] == {"data": [str(tmp_path / "there" / "corpus.jsonl")]}


def test_updates_at_the_same_time_lose_no_section(tmp_path):
    run = Run.create(tmp_path / "run")
    threads = [threading.Thread(target=Run(run.path).update, kwargs={f"part{i}": {"n": i}}) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {f"part{i}" for i in range(8)} <= set(run.manifest())


def test_events_leave_out_a_line_that_a_crash_cut_off(tmp_path):
    run = Run.create(tmp_path / "run")
    assert list(run.events()) == []
    run.event("sample", "started", questions=3)
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"stage": "sam')
    assert [(event["event"], event["questions"]) for event in run.events()] == [("started", 3)]


def test_a_directory_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    def full(*args: object, **values: object) -> None:
        raise OSError(28, "No space left on device")

    run = Run.create(tmp_path / "run")
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(RunError, match="the disk is full: free some space"):
        run.event("sample", "started")
