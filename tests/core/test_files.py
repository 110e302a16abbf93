"""Files and directories that appear whole or not at all, whatever fails and whoever else writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leret.core import files
from leret.core.errors import RunError
from leret.core.files import atomic_directory, atomic_file, is_incomplete, locked

BUSY = RunError("another process is at it")

ANOTHER = """
import sys
from pathlib import Path
from leret.core.errors import RunError
from leret.core.files import atomic_directory
try:
    with atomic_directory(Path(sys.argv[1]), "another key", RunError("busy")):
        print("is in")
except RunError as error:
    print(error)
"""


def write(directory: Path, text: str, key: str = "key", *, resumable: bool = True) -> list[str]:
    """Write a directory of one file; what was there of an earlier attempt."""
    with atomic_directory(directory, key, BUSY, resumable=resumable) as scratch:
        found = sorted(path.name for path in scratch.iterdir() if path.name != ".key")
        (scratch / "file").write_text(text)
    return found


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def another(directory: Path) -> str:
    """What another process prints that writes the directory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ANOTHER, str(directory)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "made" / "file"
    files.write_atomically(path, "old é")
    with pytest.raises(ZeroDivisionError), atomic_file(path, "wb") as file:
        file.write(b"half" * (1 // 0))
    assert path.read_text(encoding="utf-8") == "old é"
    assert names(path.parent) == ["file"]


def test_a_lock_is_for_one_holder_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "x.lock", BUSY), pytest.raises(RunError), locked(tmp_path / "x.lock", BUSY):
        pass
    with locked(tmp_path / "x.lock", BUSY):
        pass


def test_a_directory_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path / "index", "one")
    write(tmp_path / "index", "two")
    assert (names(tmp_path), names(tmp_path / "index")) == (["index"], ["file"])
    assert (tmp_path / "index" / "file").read_text() == "two"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one_and_its_target_is_written(tmp_path: Path, there: bool) -> None:
    (tmp_path / "disk").mkdir()
    if there:
        write(tmp_path / "disk" / "index", "old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "index")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link" / "file").read_text() == "new"
    assert (names(tmp_path), names(tmp_path / "disk")) == (["disk", "link"], ["index"])


def test_an_unfinished_directory_is_seen_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "index")
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "link", "key", BUSY, resumable=True):
        raise KeyboardInterrupt
    assert is_incomplete(tmp_path / "link")


def test_another_process_is_refused_until_the_move_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def replace(new: Path, directory: Path) -> None:
        said.append(another(directory))
        real(new, directory)
        said.append(another(directory.parent / "other"))

    real = files._replace
    monkeypatch.setattr(files, "_replace", replace)
    write(tmp_path / "index", "whole")
    assert said == ["busy", "is in"]
    assert names(tmp_path / "index") == ["file"]


def test_a_failed_move_keeps_the_old_directory_and_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "index", "old")

    def replace(_source: object, _target: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        with pytest.raises(OSError, match="Input/output error"):
            write(tmp_path / "index", "new")
    assert (tmp_path / "index" / "file").read_text() == "old"
    assert names(tmp_path) == [".index.building", "index"]
    assert write(tmp_path / "index", "new") == ["file"]  # the same key goes on with what is there
    assert names(tmp_path) == ["index"]


@pytest.mark.parametrize(("key", "left"), [("one", ["part"]), ("two", [])])
def test_leftovers_are_used_under_the_same_key_only(tmp_path: Path, key: str, left: list[str]) -> None:
    scratch = tmp_path / ".index.building"
    (scratch / "part").mkdir(parents=True)
    (scratch / ".key").write_text("one")
    assert write(tmp_path / "index", "text", key) == left


def test_a_failure_that_cannot_be_resumed_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_directory(tmp_path / "index", "key", BUSY) as scratch:
        (scratch / "part").write_text("x" * (1 // 0))
    assert names(tmp_path) == []
