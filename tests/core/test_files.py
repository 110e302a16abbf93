import errno
import os

import pytest

from leret.core import files
from leret.core.errors import RunError
from leret.core.files import atomic_directory, atomic_file, is_incomplete

BUSY = RunError("another process is at it")


def write(directory, text, key="key"):
    with atomic_directory(directory, key, BUSY, resumable=True) as scratch:
        found = sorted(path.name for path in scratch.iterdir() if path.name != ".key")
        (scratch / "file").write_text(text)
    return found


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def test_file_is_replaced_whole_or_stays_and_is_named(tmp_path):
    path = tmp_path / "made" / "file"
    files.write_atomically(path, "old é")
    with pytest.raises(ZeroDivisionError), atomic_file(path, "wb") as file:
        file.write(b"half" * (1 // 0))
    with pytest.raises(OSError, match="File too large") as caught, atomic_file(path):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert caught.value.filename == str(path)
    assert path.read_text(encoding="utf-8") == "old é"
    assert names(path.parent) == ["file"]


def test_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    write(tmp_path / "disk" / "index", "old")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "index")
    with pytest.raises(KeyboardInterrupt), atomic_directory(link, "key", BUSY, resumable=True):
        raise KeyboardInterrupt
    assert is_incomplete(link)
    write(link, "new")
    assert link.is_symlink()
    assert (names(link), (link / "file").read_text()) == (["file"], "new")
    assert (names(tmp_path), names(tmp_path / "disk")) == (["disk", "link"], ["index"])


def test_second_writer_is_refused_until_the_end(tmp_path, monkeypatch):
    def replace(new, directory):
        with pytest.raises(RunError, match="at it"):
            write(directory, "another")
        real(new, directory)
        monkeypatch.undo()
        write(directory.parent / "other", "is in")

    real = files._replace
    monkeypatch.setattr(files, "_replace", replace)
    write(tmp_path / "index", "whole")
    assert (names(tmp_path), (tmp_path / "index" / "file").read_text()) == (["index", "other"], "whole")


@pytest.mark.parametrize(("key", "left"), [("key", ["file"]), ("another", [])])
def test_failed_move_keeps_the_directory_and_the_work(tmp_path, monkeypatch, key, left):
    def replace(_source, _target):
        raise OSError(5, "Input/output error")

    write(tmp_path / "index", "old")
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "index", "new")
    monkeypatch.undo()
    assert (tmp_path / "index" / "file").read_text() == "old"
    assert names(tmp_path) == [".index.building", "index"]
    assert write(tmp_path / "index", "new", key) == left
    assert (names(tmp_path), names(tmp_path / "index")) == (["index"], ["file"])
    assert (tmp_path / "index" / "file").read_text() == "new"
