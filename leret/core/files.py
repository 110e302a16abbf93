"""Atomic writes of files and directories, locks between processes, and the cache directory."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from leret.core.errors import ConfigError, LeretError

_KEY = ".key"  # file with the content key of an unfinished directory


@contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that replaces ``path`` when the block succeeds. Missing directories are created.

    ``mode`` is ``w`` (UTF-8) or ``wb``. OSError if the disk is full or the directory is not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(handle, 0o644)  # mkstemp makes the file private to its owner
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a write names no file
            error.filename = str(path)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically, with `atomic_file`."""
    with atomic_file(path) as file:
        file.write(text)


def file_digest(path: Path) -> bytes:
    """Return the 16-byte BLAKE2b digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()


def rendered(template: Path, values: Mapping[str, Any]) -> str:
    """Fill in a Jinja template of plain text; its filters quote text for the shell and as JSON."""
    from jinja2 import Environment, StrictUndefined  # imported late to keep every command fast

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["shell"] = lambda path: shlex.quote(str(path))
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


def require_writable(directory: Path, name: str) -> None:
    """Raise a ConfigError if a directory, which may be missing, cannot be written; ``name`` is its flag or key.

    A temporary file is written and removed, because permissions do not show a read-only or virtual file system.
    """
    parent = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        fault = f"{name} {directory} cannot be written (no file can be created in {parent}: {error.strerror})"
        raise ConfigError(f"{fault}; choose a writable directory") from error


@contextmanager
def locked(path: Path, busy: LeretError) -> Iterator[None]:
    """Hold a lock file until the block or the process ends; raise ``busy`` if another process holds it."""
    from filelock import FileLock, Timeout  # imported late to keep commands that write nothing fast

    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as lock:
        try:
            lock.enter_context(FileLock(path, timeout=0, thread_local=False))
        except Timeout:
            raise busy from None
        yield


@contextmanager
def atomic_directory(
    directory: Path, key: str, busy: LeretError, *, resumable: bool = False
) -> Iterator[Path]:
    """Create a directory, ``.NAME.building``, that replaces ``directory`` when the block succeeds.

    The new directory is empty unless an unfinished block with the same key left content. OSError if it is not writable.

    Args:
        directory: path to replace. A symbolic link remains, and the directory it points to is replaced.
        key: identifies the content. Content left by a killed process with another key is deleted.
        busy: raised if another process is writing the same directory.
        resumable: keep the content of a failed block for the next block with the same key.
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
    """Check whether an `atomic_directory` block for this directory is unfinished (running or killed)."""
    return _scratch(Path(os.path.realpath(directory))).is_dir()


def cache_directory() -> Path:
    """Return ``LERET_CACHE_DIR``, or ``leret`` in the user's cache directory."""
    path = os.environ.get("LERET_CACHE_DIR")
    if path:
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "leret"


def _scratch(target: Path) -> Path:
    return target.parent / f".{target.name}.building"


def _replace(new: Path, directory: Path) -> None:
    """Replace ``directory`` with ``new``. Processes that have memory-mapped the old files can still read them."""
    if not directory.exists():
        os.replace(new, directory)
        return
    old = directory.with_name(f".{directory.name}.old.{uuid4().hex}")
    directory.rename(old)
    try:
        os.replace(new, directory)
    except BaseException:
        old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)


def read_uri(path: Path) -> str:
    """Return the read-only URI of an SQLite file; ``immutable`` is set if there is no write-ahead log."""
    at_rest = not path.with_name(path.name + "-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if at_rest else ''}"
