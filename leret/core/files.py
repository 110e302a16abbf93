"""Files and directories that appear whole or not at all, locks between processes, and the cache directory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from leret.core.errors import LeretError

_KEY = ".key"
"""In an unfinished directory: names what it will hold."""


@contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write to, which takes the place of ``path`` when the block has succeeded.

    Args:
        path: its directory is made where it is missing.
        mode: ``w`` (UTF-8) or ``wb``.

    Raises:
        OSError: the disk is full, or the directory cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(handle, 0o644)  # mkstemp's own mode hides the file from everybody else
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with atomic_file(path) as file:
        file.write(text)


@contextmanager
def locked(path: Path, busy: LeretError) -> Iterator[None]:
    """Hold a lock file, which stays, until the block or the process ends; ``busy`` is raised where another holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(path, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise busy from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def atomic_directory(directory: Path, key: str, busy: LeretError, *, resumable: bool = False) -> Iterator[Path]:
    """A directory to write to, ``.NAME.building``, which takes the place of ``directory`` when the block has succeeded.

    Args:
        directory: replaced. Of a link, what it names is replaced.
        key: names what is written; what a killed process left under another key is thrown away.
        busy: raised where another process is writing the same directory.
        resumable: what a failed block has written stays for the next one with the same key.

    Yields:
        An existing directory, empty but for what an earlier block of the same key left.

    Raises:
        OSError: the disk is full, or the directory cannot be written.
    """
    target = Path(os.path.realpath(directory))
    scratch = _scratch(target)
    with locked(target.parent / f".{target.name}.lock", busy):
        mark = scratch / _KEY
        if not mark.is_file() or mark.read_text(encoding="utf-8") != key:
            if scratch.exists():
                shutil.rmtree(scratch)
            scratch.mkdir(parents=True)
            mark.write_text(key, encoding="utf-8")
        try:
            yield scratch
            _replace(scratch, target)
        except BaseException:
            if not resumable:
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        (target / _KEY).unlink(missing_ok=True)


def is_incomplete(directory: Path) -> bool:
    """Did an `atomic_directory` stop before its end (or is it at work)?"""
    return _scratch(Path(os.path.realpath(directory))).is_dir()


def cache_directory() -> Path:
    """``LERET_CACHE_DIR``, or ``leret`` in the user's cache directory."""
    named = os.environ.get("LERET_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named) if named else Path(home).expanduser() / "leret"


def _scratch(target: Path) -> Path:
    return target.parent / f".{target.name}.building"


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


def read_uri(path: Path) -> str:
    """Name an SQLite file for reading; only while its log lies beside it may it change."""
    at_rest = not path.with_name(path.name + "-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if at_rest else ''}"
