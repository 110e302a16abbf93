"""A directory that appears whole or not at all.

A build writes to ``.NAME.building`` beside it and renames that at its end. What a killed build leaves there is used by
the next one where the engine can go on, and thrown away otherwise.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leret.errors import RetrievalError

__all__ = ["CLAIM", "building", "half_built"]

CLAIM = ".claim.json"
"""File by which a build holds its place, and knows whose leftovers are there."""


def half_built(directory: Path) -> bool:
    """Did a build of this directory stop before its end (or is one at work)?"""
    return _scratch(directory).is_dir()


@contextmanager
def building(directory: Path, key: str, *, resumable: bool = False) -> Iterator[Path]:
    """A place to build an index in; at the end it becomes the index.

    Args:
        directory: of the index to be; what is there is replaced when the build has succeeded.
        key: names what is built; leftovers of another key are thrown away.
        resumable: keep what was written when the build fails, for the next one with the same key.

    Yields:
        An existing directory, empty but for what an earlier build of the same key left.

    Raises:
        RetrievalError: another process is building it, or the disk is full or cannot be written.
    """
    scratch = _scratch(directory)
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with _claimed(scratch, key, directory):
            try:
                yield scratch
                (scratch / CLAIM).unlink()
                _replace(scratch, directory)
            except BaseException:
                if not resumable:
                    shutil.rmtree(scratch, ignore_errors=True)
                raise
    except OSError as error:
        raise RetrievalError(
            f"{directory}: the index cannot be written ({error.strerror or error}); "
            "free some space, or name a directory that can be written"
        ) from error


@contextmanager
def _claimed(scratch: Path, key: str, directory: Path) -> Iterator[None]:
    """Hold the build for this process; the system lets go of it when the process dies, however it dies."""
    with open(scratch / CLAIM, "a+", encoding="utf-8") as claim:
        if not _locked(claim):
            raise RetrievalError(f"{directory}: another process is building this index; wait for it, then try again")
        claim.seek(0)
        if claim.read() != key:
            for path in scratch.iterdir():
                if path.name != CLAIM:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            claim.seek(0)
            claim.truncate()
            claim.write(key)
            claim.flush()
        yield


def _locked(file: Any) -> bool:
    try:
        import fcntl
    except ImportError:  # not a POSIX system: two builds at once are then the user's to avoid
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _scratch(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.building"


def _replace(new: Path, directory: Path) -> None:
    """Move a directory to its place. Whoever has the old one mapped keeps reading it."""
    if directory.exists():
        old = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.old."))
        directory.rename(old)
        os.replace(new, directory)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(new, directory)
