"""The store: states and samples in one SQLite file, written in batches, read by id and in order.

One process writes, others may read. What belongs together (the samples that one prompt gets at one state) is written
in one transaction, so a run that is killed at any moment has it whole or not at all.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from leret.core.types import Sample, State
from leret.sampling.store.merge import Rows, of_questions
from leret.sampling.store.schema import (
    OUTAGES,
    PathStep,
    SamplingParams,
    StateSamples,
    connect,
    lock,
    run_error,
    sample_of,
    sample_row,
    state_of,
    state_row,
)

_FLUSH_ROWS = 4000
_FLUSH_S = 0.2
_N_COLUMNS = 23
_OUTAGE_SQL = ", ".join(f"'{kind}'" for kind in OUTAGES)
_PUT_SAMPLE = (
    f"INSERT INTO samples VALUES ({', '.join('?' * _N_COLUMNS)}) ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(
        f"{column} = excluded.{column}"
        for column in (
            "completion", "outputs", "doc_ids", "scores", "reward", "components", "failure_kind", "failure_message",
            "n_prompt_tokens", "n_completion_tokens",
        )
    )
    + f" WHERE samples.failure_kind IN ({_OUTAGE_SQL})"
)  # fmt: skip
_DONE_SQL = (
    "SELECT question_id FROM visits WHERE policy_digest = ? AND outcome != 'next' EXCEPT "
    f"SELECT question_id FROM samples WHERE policy_digest = ? AND failure_kind IN ({_OUTAGE_SQL})"
)
_ORDER = "ORDER BY policy_digest, question_id, step, state_id, length(prompt), prompt, n"


class Store:
    """States, samples and visits of a run.

    Args:
        path: the SQLite file; made where it is missing.
        read_only: for stages that only read; no lock is taken.
        on_commit: hears of the rows of every transaction, once they are on the disk.

    Raises:
        RunError: the file is missing (read-only), damaged, of a newer leret, or another process writes it.
    """

    def __init__(
        self, path: Path, read_only: bool = False, on_commit: Callable[[Rows], None] = lambda rows: None
    ) -> None:
        self.path = path
        self._on_commit = on_commit
        self._states: list[tuple[Any, ...]] = []
        self._samples: list[tuple[Any, ...]] = []
        self._visits: list[tuple[Any, ...]] = []
        self._last_flush = time.monotonic()
        self._lock: IO[str] | None = None if read_only else lock(path)
        try:
            self._database = connect(path, read_only)
        except BaseException:
            self._unlock()
            raise

    def put_state(self, state: State) -> None:
        """Keep a state; one that is there already stays."""
        self._states.append(state_row(state))

    def put_samples(self, samples: Iterable[Sample], origin: SamplingParams) -> None:
        """Keep samples, together or not at all; a sample that is there is replaced only where it was an outage."""
        self._samples.extend(sample_row(sample, origin) for sample in samples)
        late = time.monotonic() - self._last_flush > _FLUSH_S
        if late or len(self._samples) >= _FLUSH_ROWS:
            self.flush()

    def put_visit(self, visit: PathStep) -> None:
        """Keep where a question's path went."""
        row = (visit.question_id, visit.step, visit.policy_digest, visit.state_id, visit.parent, visit.chosen)
        self._visits.append((*row, visit.outcome))

    def flush(self) -> None:
        """Commit what was put.

        Raises:
            RunError: the disk is full or read-only; what was committed before stays.
        """
        self._last_flush = time.monotonic()
        if not (self._states or self._samples or self._visits):
            return
        with self._reporting(), self._database:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT OR IGNORE INTO states VALUES (?, ?, ?, ?, ?)", self._states)
            self._database.executemany(_PUT_SAMPLE, self._samples)
            self._database.executemany("INSERT OR REPLACE INTO visits VALUES (?, ?, ?, ?, ?, ?, ?)", self._visits)
        rows = Rows(self._states, self._samples, self._visits)
        self._states, self._samples, self._visits = [], [], []
        self._on_commit(rows)

    def put_rows(self, rows: Rows) -> None:
        """Keep rows of another store, by the rules of `put_state`, `put_samples` and `put_visit`."""
        self._states.extend(rows.states)
        self._samples.extend(rows.samples)
        self._visits.extend(rows.visits)
        if time.monotonic() - self._last_flush > _FLUSH_S or len(self._samples) >= _FLUSH_ROWS:
            self.flush()

    def rows(self, policy_digest: str, question_ids: Iterable[str]) -> Rows:
        """All rows of some questions under one policy, for another store."""
        self.flush()
        with self._reporting():
            return of_questions(self._database, policy_digest, question_ids)

    def close(self) -> None:
        """Commit and let go of the file; may be called twice."""
        try:
            self.flush()
        finally:
            self._database.close()
            self._unlock()

    def sample(self, sample_id: str) -> Sample | None:
        """A sample by its id."""
        rows = self._read("SELECT * FROM samples WHERE id = ?", (sample_id,))
        return sample_of(rows[0]) if rows else None

    def samples_at(self, question_id: str, step: int, state_id: str, policy_digest: str) -> list[Sample]:
        """What one policy was asked at one visit of a state, as far as it is committed."""
        where = "policy_digest = ? AND question_id = ? AND step = ? AND state_id = ?"
        rows = self._read(
            f"SELECT * FROM samples WHERE {where} {_ORDER}", (policy_digest, question_id, step, state_id), flush=False
        )
        return [sample_of(row) for row in rows]

    def visits(self, policy_digest: str, question_id: str) -> list[PathStep]:
        """The path of a question so far, as far as it is committed."""
        sql = "SELECT * FROM visits WHERE question_id = ? AND policy_digest = ? ORDER BY step"
        return [PathStep(**row) for row in self._read(sql, (question_id, policy_digest), flush=False)]

    def done(self, policy_digest: str) -> set[str]:
        """Questions whose path ended and that have nothing to try again."""
        self.flush()
        return self._ids(_DONE_SQL, (policy_digest, policy_digest))

    def begun(self, policy_digest: str) -> set[str]:
        """Questions of which there is something, but that are not done."""
        self.flush()
        sql = f"SELECT DISTINCT question_id FROM samples WHERE policy_digest = ? EXCEPT SELECT * FROM ({_DONE_SQL})"
        return self._ids(sql, (policy_digest,) * 3)

    def groups(self, policy_digest: str | None = None) -> Iterator[StateSamples]:
        """Samples by visit, ordered by policy, question, step, state, prompt and index; read as they are taken.

        Args:
            policy_digest: of one policy alone.
        """
        self.flush()
        where, values = ("WHERE s.policy_digest = ?", (policy_digest,)) if policy_digest else ("", ())
        sql = (
            "SELECT s.*, t.predictor, t.inputs, t.messages, v.parent FROM samples s JOIN states t ON t.id = s.state_id "
            "LEFT JOIN visits v ON (v.question_id, v.step, v.policy_digest) = (s.question_id, s.step, s.policy_digest) "
            f"{where} ORDER BY s.policy_digest, s.question_id, s.step, s.state_id, length(s.prompt), s.prompt, s.n"
        )
        with self._reporting():
            rows = self._database.execute(sql, values)
            for (digest, step, _), group in groupby(rows, lambda r: (r["policy_digest"], r["step"], r["state_id"])):
                members = list(group)
                first = members[0]
                state = state_of(first, step, first["parent"])
                yield StateSamples(state, digest, tuple(sample_of(row) for row in members))

    def finished(self, policy_digest: str | None = None) -> Iterator[StateSamples]:
        """The `groups` of questions that are done."""
        done = {digest: self.done(digest) for digest in self.policy_digests()}
        return (group for group in self.groups(policy_digest) if group.state.question_id in done[group.policy_digest])

    def question_ids(self) -> set[str]:
        """Every question that was sampled."""
        return {row["question_id"] for row in self._read("SELECT DISTINCT question_id FROM states")}

    def policy_digests(self) -> list[str]:
        """The policies that were asked, in the order of their first sample."""
        sql = "SELECT policy_digest FROM samples GROUP BY policy_digest ORDER BY min(rowid)"
        return [row["policy_digest"] for row in self._read(sql)]

    def counts(self, policy_digest: str | None = None) -> dict[str, int]:
        """``states``, ``samples``, ``rewarded``, and the number of failures by kind as ``failed_KIND``."""
        where, values = ("WHERE policy_digest = ?", (policy_digest,)) if policy_digest else ("", ())
        found = self._read(
            "SELECT count(DISTINCT state_id || step) AS states, count(*) AS samples, count(reward) AS rewarded "
            f"FROM samples {where}",
            values,
        )[0]
        failed = self._read(
            f"SELECT failure_kind AS kind, count(*) AS n FROM samples {where} GROUP BY 1 ORDER BY 1", values
        )
        return dict(found) | {f"failed_{row['kind']}": row["n"] for row in failed if row["kind"] is not None}

    def _read(self, sql: str, values: Sequence[Any] = (), flush: bool = True) -> list[sqlite3.Row]:
        if flush:
            self.flush()
        with self._reporting():
            return self._database.execute(sql, values).fetchall()

    def _ids(self, sql: str, values: Sequence[Any]) -> set[str]:
        """Task ids, one at a time: there may be many."""
        with self._reporting():
            return {row[0] for row in self._database.execute(sql, values)}

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise run_error(self.path, error) from error

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
