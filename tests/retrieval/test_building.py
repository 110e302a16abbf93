"""A directory that appears whole or not at all, whatever fails and whoever else builds it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from leret.core import files as module
from leret.core.errors import RetrievalError
from leret.core.files import building, half_built

ANOTHER = """
import sys
from pathlib import Path
from leret.errors import RetrievalError
from leret.retrieval.building import building
try:
    with building(Path(sys.argv[1]), "another key"):
        print("is in")
except RetrievalError as error:
    print(error)
"""


def build(directory: Path, text: str, key: str = "key", *, resumable: bool = True) -> list[str]:
    """Build a directory of one file; what was there of an earlier build."""
    with building(directory, key, resumable=resumable) as scratch:
        found = sorted(path.name for path in scratch.iterdir() if path.name != module.CLAIM)
        (scratch / "file").write_text(text)
    return found


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def another(directory: Path) -> str:
    """What another process is told that builds the directory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ANOTHER, str(directory)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def failing(calls: list[int]) -> Callable[[str | Path, str | Path], None]:
    """An `os.replace` whose calls of these numbers fail."""
    real, n = os.replace, 0

    def replace(source: str | Path, target: str | Path) -> None:
        nonlocal n
        n += 1
        if n in calls:
            raise OSError(5, "Input/output error")
        real(source, target)

    return replace


def test_a_build_replaces_the_directory_and_leaves_nothing_beside(tmp_path: Path) -> None:
    build(tmp_path / "index", "one")
    build(tmp_path / "index", "two")
    assert (names(tmp_path), names(tmp_path / "index")) == (["index"], ["file"])
    assert (tmp_path / "index" / "file").read_text() == "two"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one_and_what_it_names_is_built(tmp_path: Path, there: bool) -> None:
    (tmp_path / "disk").mkdir()
    if there:
        build(tmp_path / "disk" / "index", "old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "index")
    build(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link" / "file").read_text() == "new"
    assert (names(tmp_path), names(tmp_path / "disk")) == (["disk", "link"], ["index"])


def test_a_half_built_index_is_noticed_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "index")
    with pytest.raises(KeyboardInterrupt), building(tmp_path / "link", "key", resumable=True):
        raise KeyboardInterrupt
    assert half_built(tmp_path / "link")


def test_nobody_comes_in_while_the_build_is_moved_to_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def replace(new: Path, directory: Path) -> None:
        said.append(another(directory))
        real(new, directory)
        said.append(another(directory.parent / "other"))

    real = module._replace
    monkeypatch.setattr(module, "_replace", replace)
    build(tmp_path / "index", "whole")
    assert "another process is building this index" in said[0]
    assert said[1] == "is in\n"
    assert names(tmp_path / "index") == ["file"]


def test_a_failed_move_keeps_the_old_directory_and_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "index", "old")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", failing([1]))
        with pytest.raises(RetrievalError, match="cannot be written"):
            build(tmp_path / "index", "new")
    assert (tmp_path / "index" / "file").read_text() == "old"
    assert names(tmp_path) == [".index.building", "index"]
    assert build(tmp_path / "index", "new") == ["file"]  # the same build goes on with what is there
    assert names(tmp_path) == ["index"]


def test_a_directory_that_cannot_be_moved_leaves_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "index", "old")

    def rename(_self: Path, _target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        with pytest.raises(RetrievalError, match="Permission denied"):
            build(tmp_path / "index", "new", resumable=False)
    assert names(tmp_path) == ["index"]
    assert (tmp_path / "index" / "file").read_text() == "old"


def test_leftovers_of_another_build_are_thrown_away(tmp_path: Path) -> None:
    scratch = tmp_path / ".index.building"
    (scratch / "part").mkdir(parents=True)
    (scratch / module.CLAIM).write_text("one")
    assert build(tmp_path / "index", "text", "one") == ["part"]
    (scratch / "part").mkdir(parents=True)
    (scratch / module.CLAIM).write_text("one")
    assert build(tmp_path / "index", "text", "two") == []


def test_a_claim_that_was_moved_away_before_it_was_locked_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / ".index.building"
    real, moved = module._locked, []

    def locked(file: object) -> bool:
        if not moved:
            moved.append(scratch.rename(tmp_path / "index"))  # another build ended just now
        return real(file)

    monkeypatch.setattr(module, "_locked", locked)
    with building(tmp_path / "index", "key") as made:
        assert made.is_dir()
        (made / "file").write_text("text")
    assert names(tmp_path / "index") == ["file"]
