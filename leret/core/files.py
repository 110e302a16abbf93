"""A directory that appears whole or not at all.

A build writes to ``.NAME.building`` beside it and renames that at its end. What a killed build leaves there is used by
the next one where the engine can go on, and thrown away otherwise.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from leret.core.errors import RetrievalError

CLAIM = ".claim.json"
"""File by which a build holds its place, and knows whose leftovers are there."""


def half_built(directory: Path) -> bool:
    """Did a build of this directory stop before its end (or is one at work)?"""
    return _scratch(_place(directory)).is_dir()


@contextmanager
def building(directory: Path, key: str, *, resumable: bool = False) -> Iterator[Path]:
    """A place to build an index in; at the end it becomes the index.

    Args:
        directory: of the index to be; what is there is replaced when the build has succeeded. A link stays one, and
            what it names is built.
        key: names what is built; leftovers of another key are thrown away.
        resumable: keep what was written when the build fails, for the next one with the same key.

    Yields:
        An existing directory, empty but for what an earlier build of the same key left.

    Raises:
        RetrievalError: another process is building it, or the disk is full or cannot be written.
    """
    place = _place(directory)
    scratch = _scratch(place)
    try:
        with _claimed(scratch, key, directory):
            try:
                yield scratch
                _replace(scratch, place)
            except BaseException:
                if not resumable:
                    _remove(scratch)
                raise
            (place / CLAIM).unlink(missing_ok=True)  # held until here: nobody takes the scratch before it is the index
    except OSError as error:
        raise RetrievalError(
            f"{directory}: the index cannot be written ({error.strerror or error}); "
            "free some space, or name a directory that can be written"
        ) from error


@contextmanager
def _claimed(scratch: Path, key: str, directory: Path) -> Iterator[None]:
    """Hold the build for this process; the system lets go of it when the process dies, however it dies."""
    with _claim(scratch, directory) as claim:
        claim.seek(0)
        if claim.read() != key:
            _empty(scratch)
            claim.seek(0)
            claim.truncate()
            claim.write(key)
            claim.flush()
        yield


def _claim(scratch: Path, directory: Path) -> TextIO:
    """The claim's file, locked; the scratch is made where there is none."""
    path = scratch / CLAIM
    while True:
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            claim = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (the caller closes it)
        except FileNotFoundError:  # another build's scratch has just become its index
            continue
        if not _locked(claim):
            claim.close()
            raise RetrievalError(f"{directory}: another process is building this index; wait for it, then try again")
        if _is_at(claim, path):
            return claim
        claim.close()


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


def _is_at(file: TextIO, path: Path) -> bool:
    """Is an open file still the one at its path, or was it moved or deleted before it was locked?"""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _place(directory: Path) -> Path:
    """Where a directory is, links followed; it need not be there yet."""
    return Path(os.path.realpath(directory))


def _scratch(place: Path) -> Path:
    return place.parent / f".{place.name}.building"


def _empty(scratch: Path) -> None:
    for path in scratch.iterdir():
        if path.name != CLAIM:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove(scratch: Path) -> None:
    """Delete the scratch, its claim last: until then nobody else begins there."""
    with suppress(OSError):
        _empty(scratch)
        (scratch / CLAIM).unlink()
        scratch.rmdir()


def _replace(new: Path, directory: Path) -> None:
    """Move a directory to its place. Whoever has the old one mapped keeps reading it."""
    if not directory.exists():
        os.replace(new, directory)
        return
    old = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.old."))
    try:
        directory.rename(old)
    except OSError:
        old.rmdir()
        raise
    try:
        os.replace(new, directory)
    except BaseException:
        old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)
