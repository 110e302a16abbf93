"""The SQLite file under the store: opening it, locking it, and what its errors mean."""

from __future__ import annotations

import fcntl
import sqlite3
from pathlib import Path
from shutil import disk_usage
from typing import IO

from leret.errors import RunError
from leret.sampling.records import SCHEMA_SQL

__all__ = ["STORE_SCHEMA", "connect", "lock", "run_error"]

STORE_SCHEMA = 1
"""Version of the tables, kept in ``PRAGMA user_version``."""

_LEAST_FREE = 2**20
"""Bytes. Even a reader makes a file of 32 KiB beside a store, and on a full disk SQLite says "disk I/O error"."""


def lock(path: Path, what: str = "sampled into") -> IO[str]:
    """An advisory lock beside ``path``, as of the store, which ends with the process, however it ends.

    Raises:
        RunError: another process holds it, or the directory cannot be written.
    """
    place = path.with_name(path.name + ".lock")
    try:
        file = place.open("a")
    except OSError as error:
        raise RunError(f"{place} cannot be written ({error}); name a run directory that you may write") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise RunError(
            f"{path.parent} is being {what} by another process; wait for it, or give another name"
        ) from error
    return file


def connect(path: Path, read_only: bool) -> sqlite3.Connection:
    """The store's file, with its tables.

    Raises:
        RunError: it is missing (read-only), damaged, or of another schema.
    """
    if read_only and not path.is_file():
        raise RunError(f"{path} does not exist; run `leret sample RECIPE --run {path.parent}` first")
    mode = "ro" if read_only else "rwc"
    try:
        database = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=30,
        )
        database.row_factory = sqlite3.Row
        version = database.execute("PRAGMA user_version").fetchone()[0]
        empty = not database.execute("SELECT 1 FROM sqlite_master").fetchone()
        if version == 0 and empty and not read_only:
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(f"BEGIN;{SCHEMA_SQL}PRAGMA user_version = {STORE_SCHEMA};COMMIT;")
            version = STORE_SCHEMA
        database.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error as error:
        raise run_error(path, error) from error
    if version != STORE_SCHEMA:
        database.close()
        raise RunError(
            f"{path} is a store of schema {version}, this leret reads schema {STORE_SCHEMA}; "
            "use the leret that wrote it, or start a new run"
        )
    return database


def run_error(path: Path, error: sqlite3.Error) -> RunError:
    """What SQLite says, in words that tell what to do."""
    text = str(error)
    again = "run the same command again, it goes on from here"
    if "full" in text or ("disk I/O" in text and disk_usage(path.parent).free < _LEAST_FREE):
        return RunError(f"{path} cannot be written: the disk is full; free some space and {again}")
    if "readonly" in text or "unable to open" in text:
        return RunError(f"{path} cannot be opened for this ({text}); name a run directory that you may read and write")
    if "not a database" in text or "malformed" in text:
        return RunError(f"{path} is damaged ({text}); restore it, or delete it to sample again")
    if "locked" in text:
        return RunError(f"{path} is held by another process ({text}); wait for it, or name another run")
    return RunError(f"{path} failed: {text}; check the disk and {again}")
