"""Index of a run's store: a row per question and per group, in a temporary file.

It makes every page one fast query.

The store is attached read-only. It is read in small batches, and requests are answered between
them; later batches add the samples that a running `leret sample` commits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from copy import copy
from pathlib import Path
from typing import Any, TypeVar, cast

from leret.core.files import read_uri
from leret.core.runs import Run
from leret.sampling.store.store import OUTAGE_SQL, Store, connect, errors_of

_TABLES = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA temp_store = FILE; PRAGMA automatic_index = OFF;
CREATE TABLE policies (place INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, name TEXT NOT NULL);
CREATE TABLE batch (question_id TEXT PRIMARY KEY);
CREATE TABLE groups (
    question_id TEXT, policy_digest TEXT, step INTEGER, state_id TEXT, sampled INTEGER, n INTEGER, rewarded INTEGER,
    best REAL, worst REAL, total REAL, failures INTEGER, outages INTEGER, texts INTEGER, recall REAL, least_recall REAL,
    unparsed INTEGER,
    PRIMARY KEY (question_id, policy_digest, step, state_id)
);
CREATE TABLE questions (
    question_id TEXT PRIMARY KEY, text TEXT, steps INTEGER, n INTEGER, best REAL, mean REAL, spread REAL,
    failures INTEGER, outages INTEGER, recall REAL
);
"""
_FACTS = """
CREATE TABLE tasks (id TEXT PRIMARY KEY, text TEXT, type TEXT, answers TEXT) WITHOUT ROWID;
CREATE TABLE gold (question_id TEXT, doc_id TEXT, in_corpus INTEGER, PRIMARY KEY (question_id, doc_id)) WITHOUT ROWID;
CREATE TABLE documents (doc_id TEXT PRIMARY KEY, title TEXT, text TEXT, parent TEXT) WITHOUT ROWID;
CREATE TABLE results (number INTEGER, system TEXT, question_id TEXT, hop INTEGER, query TEXT, completion TEXT,
    doc_ids TEXT, recall REAL, ap REAL, unparsed INTEGER, failure TEXT,
    PRIMARY KEY (question_id, system, hop)) WITHOUT ROWID;
CREATE TABLE ends (system TEXT, question_id TEXT, value REAL, PRIMARY KEY (system, question_id)) WITHOUT ROWID;
CREATE TABLE pairs (question_id TEXT, state_id TEXT, step INTEGER, chosen_id TEXT, rejected_id TEXT, margin REAL);
CREATE INDEX pairs_of_a_state ON pairs (question_id, state_id);
CREATE TABLE evaluations (name TEXT PRIMARY KEY, about TEXT) WITHOUT ROWID;
CREATE TABLE bars (name TEXT, step INTEGER, bin INTEGER, low REAL, high REAL, n INTEGER, share REAL, mean REAL);
CREATE TABLE cuts (policy_digest TEXT PRIMARY KEY, n INTEGER) WITHOUT ROWID;
CREATE TABLE tokens (id INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE notes (text TEXT);
"""
"""Tables that `leret.viewer.collect` fills with facts that are not in the store."""

_AMOUNTS = "CREATE TEMP TABLE amounts (name TEXT, step INTEGER, value REAL);"
_BARS = """
WITH ranges AS (SELECT name, min(0.0, min(value)) AS low, max(1.0, max(value)) AS high FROM amounts GROUP BY name)
INSERT INTO bars SELECT name, step + 1, min(9, CAST(10 * (value - low) / (high - low) AS INTEGER)) AS bin, low, high,
    count(*), count(*) * 1.0 / sum(count(*)) OVER step, sum(sum(value)) OVER step / sum(count(*)) OVER step
FROM amounts JOIN ranges USING (name) GROUP BY name, step, bin WINDOW step AS (PARTITION BY name, step);
"""
"""Histograms of the amounts in ten bins, by step from 1; they include 0 and 1."""

_GROUPS = f"""
INSERT OR REPLACE INTO groups
SELECT s.question_id, s.policy_digest, s.step, s.state_id, max(ifnull(json_extract(s.components, '$.sampled'), 1)),
    count(*), count(s.reward), max(s.reward), min(s.reward), sum(s.reward), count(s.failure_kind),
    sum(ifnull(s.failure_kind IN ({OUTAGE_SQL}), 0)), count(DISTINCT s.completion),
    max(json_extract(s.components, '$.recall')), min(json_extract(s.components, '$.recall')),
    sum(ifnull(s.failure_kind = 'parse', 0))
FROM batch b CROSS JOIN policies p
CROSS JOIN run.samples s ON s.policy_digest = p.digest AND s.question_id = b.question_id
GROUP BY s.question_id, s.policy_digest, s.step, s.state_id
"""
_QUESTIONS = """
INSERT INTO questions
SELECT b.question_id, (
        SELECT ifnull((SELECT text FROM facts.tasks WHERE id = b.question_id),
            ifnull(json_extract(t.inputs, '$.question'), t.inputs))
        FROM groups f JOIN run.states t ON t.id = f.state_id AND t.question_id = f.question_id
        WHERE f.question_id = b.question_id ORDER BY f.step LIMIT 1
    ), max(g.step) + 1, sum(g.n), max(g.best), sum(g.total) / sum(g.rewarded), max(g.best - g.worst), sum(g.failures),
    sum(g.outages), max(g.recall)
FROM batch b JOIN groups g ON g.question_id = b.question_id WHERE g.sampled GROUP BY b.question_id
ON CONFLICT (question_id) DO UPDATE SET text = excluded.text, steps = excluded.steps, n = excluded.n,
    best = excluded.best, mean = excluded.mean, spread = excluded.spread, failures = excluded.failures,
    outages = excluded.outages, recall = excluded.recall
"""
_RESULTS = """
INSERT INTO questions SELECT t.id, t.text, 0, 0, NULL, NULL, NULL, 0, 0, NULL FROM facts.tasks t
WHERE t.id IN (SELECT question_id FROM facts.ends UNION SELECT question_id FROM questions)
ON CONFLICT (question_id) DO UPDATE SET text = excluded.text
"""
_ROWS = 1000  # samples per batch: some 15 ms
_RETRIED = 500  # questions per batch that had outages, which `leret sample` retries in place
_REMEMBERED = 8

T = TypeVar("T")
Values = Sequence[Any] | Mapping[str, Any]


def with_store(run: Run, file: Path) -> Run:
    """Return a run that has a store.

    A run that was trained or evaluated without stored samples gets an empty one beside ``file``.
    """
    if run.store.is_file() or not (any(run.policies.glob("*/training.json")) or run.summaries()):
        return run
    shown = copy(run)
    shown.store = file.with_suffix(".store")
    Store(shown.store).close()
    return shown


class RunIndex:
    """Database with a run's index (``main``), store (``run``) and collected facts (``facts``).

    Attributes:
        version: increases with every change of the run.
        complete: False while stored samples are not in the index yet.
    """

    def __init__(self, run: Run, file: Path) -> None:
        self.run = run = with_store(run, file)
        self.version = 0
        self.complete = False
        connect(run.store, read_only=True).close()  # checks the schema
        self._database = sqlite3.connect(
            file.absolute().as_uri(), uri=True, isolation_level=None, check_same_thread=False
        )
        self._database.row_factory = sqlite3.Row
        self.close = self._database.close
        self._database.executescript(_TABLES)
        self._database.execute("ATTACH ':memory:' AS facts")
        tables = _FACTS.replace("INDEX ", "INDEX facts.").replace("TABLE ", "TABLE facts.")
        self._database.executescript(tables)
        self._stamp: tuple[Any, ...] = ()
        self._memo: dict[tuple[Any, ...], Any] = {}
        self._last = 0  # rowid of the last sample in the index
        self.advance()

    def advance(self) -> bool:
        """Index the next batch of new samples; return False if there is nothing new."""
        with errors_of(self.run.store):
            if not self._is_changed() and self.complete:
                return False
            sql = (
                "SELECT rowid, question_id, policy_digest, policy FROM run.samples "
                f"WHERE rowid > ? ORDER BY rowid LIMIT {_ROWS}"
            )
            rows = self._database.execute(sql, (self._last,)).fetchall()
            ids = {row["question_id"] for row in rows}
            if len(rows) < _ROWS:
                ids |= self._column(
                    f"SELECT question_id FROM questions WHERE outages LIMIT {_RETRIED}"
                )
                self.complete = True
            if rows:
                self._last = rows[-1]["rowid"]
            names = {sampled["digest"]: sampled["policy"] for sampled in self.run.manifest.rounds}
            for row in rows:
                names.setdefault(row["policy_digest"], row["policy"])
            self._database.executemany(
                "INSERT OR IGNORE INTO policies (digest, name) VALUES (?, ?)", names.items()
            )
            self._database.execute("DELETE FROM batch")
            self._database.executemany(
                "INSERT INTO batch VALUES (?)", [(question_id,) for question_id in ids]
            )
            self._database.execute(_GROUPS)
            self._database.execute(_QUESTIONS)
            self.version += 1
            return True

    def use(self, file: Path) -> None:
        """Replace the collected facts by those in a file of `create_facts`."""
        uri = f"{file.absolute().as_uri()}?mode=ro&immutable=1"
        with errors_of(self.run.store):
            self._database.execute("DETACH facts")
            self._database.execute("ATTACH ? AS facts", (uri,))
            self._database.execute(_RESULTS)
        self.version += 1

    def read(self, sql: str, values: Values = ()) -> list[sqlite3.Row]:
        with errors_of(self.run.store):
            return self._database.execute(sql, values).fetchall()

    def one(self, sql: str, values: Values = ()) -> Any:
        """Return the first value of the first row; None if there is no row."""
        rows = self.read(sql, values)
        if not rows:
            return None
        return rows[0][0]

    def cached(
        self, sql: str, values: Mapping[str, Any], convert: Callable[[sqlite3.Cursor], T]
    ) -> T:
        """Return the converted rows of a query.

        The last queries are remembered until the run changes.
        """
        key = self.version, sql, *values.items()
        if key not in self._memo:
            if len(self._memo) >= _REMEMBERED or next(iter(self._memo), key)[0] != self.version:
                self._memo.clear()
            with errors_of(self.run.store):
                self._memo[key] = convert(self._database.execute(sql, values))
        return cast(T, self._memo[key])

    def _is_changed(self) -> bool:
        """Return True if the store changed since the last call.

        Start again if its rewards were recomputed.
        """
        status = self.run.store.stat()
        uri = read_uri(self.run.store)  # immutable if no process writes
        file = uri, status.st_ino, status.st_mtime_ns if "immutable" in uri else 0
        before = self._stamp
        if not before or file != before[0]:
            if before:
                self._database.execute("DETACH run")
            self._database.execute("ATTACH ? AS run", (uri,))
        version = self._column("PRAGMA run.data_version").pop()
        name = self._column("PRAGMA run.application_id").pop()
        self._stamp = file, name, version
        if before and (before[0][1], before[1]) != (status.st_ino, name):
            self._last = 0
            self.complete = False
        return before != self._stamp

    def _column(self, sql: str) -> set[Any]:
        return {row[0] for row in self._database.execute(sql)}


def create_facts(path: Path, rows: Iterable[tuple[str, Sequence[Any]]]) -> None:
    """Write a file of facts; ``rows`` are (table, values), and the first row with a key wins.

    Rows of ``amounts`` (name, step, value) become histograms.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN; {_FACTS}{_AMOUNTS}"
        )
        for table, values in rows:
            marks = ", ".join("?" * len(values))
            database.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", values)
        database.execute(_BARS)
        database.execute("COMMIT")
