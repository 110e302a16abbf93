"""Answers on disk, shared by runs and processes: SQLite in WAL mode, the answers unused for longest thrown away first.

A cache must never cost an answer: whatever is wrong with the file, searches go on without it, and it is said once.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import zstandard

from leret.core.types import Passage, Ranking

_LOG = logging.getLogger("leret")

_FILE = "answers-2.sqlite"
"""The layout's number is in the name: another leret's layout is another file."""

_TOUCHES = 512
"""Answers used since their last use was written down: a hit costs no write."""

_KEEP = 0.9
"""Share of the bound that is left after throwing away."""

_ROW_BYTES = 150
"""What an answer takes in the file beside its value: key, numbers, two indexes, room between rows."""

_LOG_BYTES = 4 << 20
"""Of SQLite's write-ahead log, once it is written back."""

_WAIT_S = 10.0
"""For other processes, after which a batch does without the cache."""

_AT_ONCE = 500
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, used REAL NOT NULL, size INTEGER NOT NULL, value BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_by_use ON answers (used, size);
CREATE TABLE IF NOT EXISTS total (one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER NOT NULL);
INSERT OR IGNORE INTO total VALUES (1, 0);
"""


class DiskCache:
    """Rankings by the digest of (retriever, query, k); safe for many threads and processes.

    Args:
        directory: of the file; made where it is missing.
        max_bytes: of the file, beside a write-ahead log of some megabytes.
    """

    def __init__(self, directory: Path, max_bytes: int = 2 << 30) -> None:
        self.path = directory / _FILE
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._touched: dict[bytes, float] = {}
        self._packer = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=True)
        self._unpacker = zstandard.ZstdDecompressor()
        self._connection: sqlite3.Connection | None = None
        self._pid = os.getpid()
        self._opened: int | None = None  # inode of the file
        self._usable = True
        self.n_hits = 0
        self.n_misses = 0

    def get(self, retriever: str, queries: Sequence[str], k: int) -> dict[str, Ranking]:
        """What is known of a batch.

        Args:
            retriever: its digest.
            queries: any strings.
            k: documents a query.
        """
        keys = {_key(retriever, query, k): query for query in queries}
        with self._lock:
            rows = self._read(list(keys))
            found = {keys[key]: ranking for key, value in rows if (ranking := self._unpacked(key, value)) is not None}
            now = time.time()
            self._touched.update((key, now) for key, _ in rows)
            if len(self._touched) >= _TOUCHES:
                self._write({})
            self.n_hits += len(found)
            self.n_misses += len(keys) - len(found)
        return found

    def put(self, retriever: str, answers: Mapping[str, Ranking], k: int) -> None:
        """Keep answers; older ones make room."""
        values = {_key(retriever, query, k): self._packer.compress(_packed(r)) for query, r in answers.items()}
        with self._lock:
            self._write(values)

    def close(self) -> None:
        """Write down what was used, and close the file. May be called twice."""
        with self._lock:
            if self._touched:
                self._write({})
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _read(self, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        rows: list[tuple[bytes, bytes]] = []
        try:
            connection = self._open()
            if connection is None:
                return []
            for start in range(0, len(keys), _AT_ONCE):
                some = keys[start : start + _AT_ONCE]
                marks = ",".join("?" * len(some))
                rows += connection.execute(f"SELECT key, value FROM answers WHERE key IN ({marks})", some)
        except sqlite3.Error as error:
            self._harmed(error)
        return rows

    def _write(self, values: Mapping[bytes, bytes]) -> None:
        """Write answers and last uses in one transaction."""
        touched, self._touched = self._touched, {}
        try:
            connection = self._open()
            if connection is None:
                return
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(
                    "UPDATE answers SET used = ? WHERE key = ?", [(used, key) for key, used in touched.items()]
                )
                before = connection.execute("SELECT bytes FROM total").fetchone()[0]
                total = before + _insert(connection, values)
                if total > self._max_bytes:
                    total = _thrown_away(connection, int(self._max_bytes * _KEEP))
                if total != before:
                    connection.execute("UPDATE total SET bytes = ?", (total,))
            if total < before:
                connection.executescript("PRAGMA incremental_vacuum")  # `execute` would give back one page
        except sqlite3.Error as error:
            self._harmed(error)

    def _open(self) -> sqlite3.Connection | None:
        """The connection of this process: SQLite's do not survive a fork."""
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        if not self._usable:
            return None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)
            return None
        connection = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            self._opened = self.path.stat().st_ino
            _lay_out(connection)
        except sqlite3.Error:
            connection.close()
            raise
        self._connection, self._pid = connection, os.getpid()
        return connection

    def _harmed(self, error: sqlite3.Error) -> None:
        """A file that is no database is set aside; everything else leaves the cache out for this once, or for good."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if _busy(error):
            return
        if _code(error) not in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB} and self.path.is_file():
            self._give_up(error)
            return
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        try:
            if self.path.stat().st_ino != self._opened:
                return  # another process has begun anew already
            self.path.rename(aside)
            for suffix in ("-wal", "-shm"):
                self.path.with_name(f"{self.path.name}{suffix}").unlink(missing_ok=True)
        except OSError as failure:
            self._give_up(failure)
            return
        _LOG.warning("the cache of answers was damaged (%s); it is set aside as %s, and begun anew", error, aside)

    def _give_up(self, error: Exception) -> None:
        self._usable = False
        _LOG.warning("%s cannot be used (%s); searches go on without the cache of answers", self.path, error)

    def _unpacked(self, key: bytes, value: bytes) -> Ranking | None:
        try:
            entries = json.loads(self._unpacker.decompress(value))
            return tuple(Passage(*entry) for entry in entries)
        except (zstandard.ZstdError, ValueError, TypeError, MemoryError):  # a harmed frame may name any size
            self._drop(key)
            return None

    def _drop(self, key: bytes) -> None:
        _LOG.warning("an answer in %s was damaged; it is asked for again", self.path)
        try:
            if self._connection is not None:
                self._connection.execute("DELETE FROM answers WHERE key = ?", (key,))
        except sqlite3.Error as error:
            self._harmed(error)


def _lay_out(connection: sqlite3.Connection) -> None:
    """Settings and tables. SQLite waits for other processes, but not while one of them turns the file to WAL."""
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before there are tables
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA mmap_size = 268435456")
            connection.executescript(_SCHEMA)
            return
        except sqlite3.OperationalError as error:
            if not _busy(error) or time.monotonic() > until:
                raise
        time.sleep(0.005)


def _busy(error: sqlite3.Error) -> bool:
    return _code(error) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def _code(error: sqlite3.Error) -> int:
    """SQLite's, without what it says beyond it (busy with a recovery, corrupt in an index)."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _key(retriever: str, query: str, k: int) -> bytes:
    parts = (retriever, str(k), query)
    return blake2b(b"\0".join(part.encode("utf-8", "surrogatepass") for part in parts), digest_size=16).digest()


def _packed(ranking: Ranking) -> bytes:
    entries = [[p.doc_id, p.title, p.text, p.score] for p in ranking]
    return json.dumps(entries, ensure_ascii=True, separators=(",", ":")).encode()


def _insert(connection: sqlite3.Connection, values: Mapping[bytes, bytes]) -> int:
    """Insert what is new; returns its bytes."""
    now, added = time.time(), 0
    for key, value in values.items():
        size = len(value) + _ROW_BYTES
        cursor = connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", (key, now, size, value))
        added += size if cursor.rowcount else 0
    return added


def _thrown_away(connection: sqlite3.Connection, wanted: int) -> int:
    """Delete what was unused for longest until ``wanted`` bytes are left; returns what is left."""
    total: int = connection.execute("SELECT coalesce(sum(size), 0) FROM answers").fetchone()[0]
    gone: list[tuple[bytes]] = []
    rows: Iterable[tuple[bytes, int]] = connection.execute("SELECT key, size FROM answers ORDER BY used")
    for key, size in rows:
        if total <= wanted:
            break
        gone.append((key,))
        total -= size
    connection.executemany("DELETE FROM answers WHERE key = ?", gone)
    return total
