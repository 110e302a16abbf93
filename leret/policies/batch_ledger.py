"""Which batch jobs were started, for which requests, and what came back: on disk before anything is paid twice.

One SQLite file, in WAL mode, for one process. A wave is one file of requests on its way through: written down,
uploaded, started as a job, over.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from leret.errors import RunError

__all__ = ["BatchLedger", "Wave"]

_VERSION = 1
_TABLES = """
CREATE TABLE waves (id INTEGER PRIMARY KEY, file_id TEXT, job_id TEXT, over INTEGER NOT NULL DEFAULT 0, began REAL);
CREATE TABLE requests (key TEXT PRIMARY KEY, wave INTEGER NOT NULL REFERENCES waves, body TEXT NOT NULL);
CREATE TABLE answers (key TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE INDEX requests_of_a_wave ON requests (wave);
"""


@dataclass(frozen=True, slots=True)
class Wave:
    """One batch job, or what is to become one.

    Attributes:
        file_id: of the uploaded requests; None before.
        job_id: of the batch job; None before.
    """

    id: int
    file_id: str | None
    job_id: str | None


class BatchLedger:
    """The file.

    Args:
        path: made where it is missing; None keeps it in memory, and a crash loses it.

    Raises:
        RunError: it cannot be opened, or is of another version.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
                version = _VERSION
        except (OSError, sqlite3.Error) as error:
            raise RunError(f"{path} cannot be opened as a ledger of batch jobs ({error}); see to the disk") from error
        if version != _VERSION:
            raise RunError(f"{path} is of version {version}, this leret reads {_VERSION}; use the leret that wrote it")

    def answer(self, key: str) -> str | None:
        """The body of the answer to a request; None where there is none yet."""
        row = self._db.execute("SELECT body FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def open_wave(self, key: str) -> Wave | None:
        """The wave that is not over and that holds a request."""
        row = self._db.execute(
            "SELECT w.id, w.file_id, w.job_id FROM requests r JOIN waves w ON w.id = r.wave "
            "WHERE r.key = ? AND NOT w.over",
            (key,),
        ).fetchone()
        return None if row is None else Wave(*row)

    def begin(self, bodies: Mapping[str, str]) -> Wave:
        """Write down the requests of a new wave.

        Args:
            bodies: JSON by key.
        """
        self._db.execute("BEGIN IMMEDIATE")
        wave = self._db.execute("INSERT INTO waves (began) VALUES (?)", (time.time(),)).lastrowid or 0
        self._db.executemany(
            "INSERT OR REPLACE INTO requests (key, wave, body) VALUES (?, ?, ?)",
            [(key, wave, body) for key, body in bodies.items()],
        )
        self._db.execute("COMMIT")
        return Wave(wave, None, None)

    def bodies(self, wave: Wave) -> dict[str, str]:
        """The requests of a wave, by key, in a fixed order."""
        rows = self._db.execute("SELECT key, body FROM requests WHERE wave = ? ORDER BY key", (wave.id,))
        return dict(rows.fetchall())

    def uploaded(self, wave: Wave, file_id: str) -> Wave:
        """The wave's file is at the server's."""
        self._db.execute("UPDATE waves SET file_id = ? WHERE id = ?", (file_id, wave.id))
        return Wave(wave.id, file_id, wave.job_id)

    def started(self, wave: Wave, job_id: str) -> Wave:
        """The wave is a job."""
        self._db.execute("UPDATE waves SET job_id = ? WHERE id = ?", (job_id, wave.id))
        return Wave(wave.id, wave.file_id, job_id)

    def over(self, wave: Wave, answers: Iterable[tuple[str, str]]) -> None:
        """Nothing more will come of a wave; requests without an answer are free again.

        Args:
            wave: any.
            answers: key and body.
        """
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT OR REPLACE INTO answers (key, body) VALUES (?, ?)", answers)
        self._db.execute("UPDATE waves SET over = 1 WHERE id = ?", (wave.id,))
        self._db.execute("COMMIT")

    def forget(self, keys: Sequence[str]) -> None:
        """Ask again for what came back useless."""
        self._db.executemany("DELETE FROM answers WHERE key = ?", [(key,) for key in keys])

    def jobs(self) -> set[str]:
        """The ids of all jobs that were ever started."""
        return {row[0] for row in self._db.execute("SELECT job_id FROM waves WHERE job_id IS NOT NULL")}

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._db.close()
