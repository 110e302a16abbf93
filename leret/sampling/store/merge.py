"""Rows of one store on their way into another: what workers send, and what a dead one left behind.

Rows travel as SQLite gives them, whatever their columns, between stores of one schema. Everything has an id from its
content, so that putting a row twice is putting it once.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.core.errors import RunError
from leret.sampling.store.schema import SCHEMA_SQL, connect, lock, run_error

if TYPE_CHECKING:
    from leret.sampling.store.store import Store


Row = tuple[Any, ...]

_BATCH = 4000
_RELEASED_S = 20.0
"""Seconds that a worker whose driver is gone may take to end."""


@dataclass(frozen=True)
class Rows:
    """Rows of a store's three tables, with their columns in the order of the schema."""

    states: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    visits: list[Row] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.states) + len(self.samples) + len(self.visits)

    def extend(self, other: Rows) -> None:
        """Add another one's rows to these."""
        self.states.extend(other.states)
        self.samples.extend(other.samples)
        self.visits.extend(other.visits)


@cache
def _columns(table: str) -> dict[str, int]:
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(SCHEMA_SQL)
        return {row[1]: row[0] for row in database.execute(f"PRAGMA table_info({table})")}


def column(table: str, name: str) -> int:
    """The place of a column in the rows of a table."""
    return _columns(table)[name]


def leftovers(directory: Path) -> list[Path]:
    """Stores of workers whose driver has not come to merge them."""
    return sorted(directory.glob("*.db")) if directory.is_dir() else []


def rescue(directory: Path, store: Store) -> int:
    """Take over what workers of a driver that was killed have left, and remove their stores.

    Args:
        directory: where workers keep their stores.
        store: of the run.

    Returns:
        Samples that were read.

    Raises:
        RunError: one of the stores is damaged, or its worker is still alive after some seconds.
    """
    n = 0
    for path in leftovers(directory):
        _wait_for_release(path)
        n += merge_file(store, path)
        remove_store(path)
    return n


def merge_file(store: Store, path: Path) -> int:
    """Put all rows of another store's file into a store, and commit; they stay there.

    Visits go last: a visit is never there without the samples that it chose from.

    Returns:
        Samples that were read.

    Raises:
        RunError: the file is damaged or of another schema, or the store cannot be written.
    """
    n = 0
    try:
        # Not read-only: a worker may have ended before it had made a table, and then they are made.
        with closing(connect(path, read_only=False)) as database:
            database.row_factory = None
            for batch in _batches(database, "states"):
                store.put_rows(Rows(states=batch))
            for batch in _batches(database, "samples"):
                n += len(batch)
                store.put_rows(Rows(samples=batch))
            for batch in _batches(database, "visits"):
                store.put_rows(Rows(visits=batch))
    except sqlite3.Error as error:
        raise run_error(path, error) from error
    store.flush()
    return n


def remove_store(path: Path) -> None:
    """Delete a worker's store with the files beside it."""
    for suffix in ("", "-wal", "-shm", ".lock"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def of_questions(database: sqlite3.Connection, policy_digest: str, question_ids: Iterable[str]) -> Rows:
    """All rows of some questions under one policy."""
    rows = Rows()
    for name in question_ids:
        where = (name, policy_digest)
        rows.states.extend(_all(database, "SELECT * FROM states WHERE id IN (SELECT state_id FROM samples "
                                "WHERE question_id = ? AND policy_digest = ?)", where))  # fmt: skip
        rows.samples.extend(_all(database, "SELECT * FROM samples WHERE question_id = ? AND policy_digest = ?", where))
        rows.visits.extend(_all(database, "SELECT * FROM visits WHERE question_id = ? AND policy_digest = ?", where))
    return rows


def _all(database: sqlite3.Connection, sql: str, values: tuple[str, ...]) -> Iterator[Row]:
    return (tuple(row) for row in database.execute(sql, values))


def _batches(database: sqlite3.Connection, table: str) -> Iterator[list[Row]]:
    cursor = database.execute(f"SELECT * FROM {table}")
    while batch := cursor.fetchmany(_BATCH):
        yield batch


def _wait_for_release(path: Path) -> None:
    until = time.monotonic() + _RELEASED_S
    while True:
        try:
            lock(path).close()
            return
        except RunError as error:
            if time.monotonic() > until:
                raise RunError(
                    f"{path} is still being written by a worker of an earlier command ({error}); end that worker "
                    "(`ray stop` ends all of this machine) and run the same command again"
                ) from error
        time.sleep(0.2)
