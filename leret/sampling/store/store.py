"""The store: states and samples in one SQLite file, written in batches, read by id and in order.

One process writes, others may read. The samples that one prompt gets at one state are one transaction, so a kill loses
all or none of them. Ids come from the content of a row, so putting or merging a row twice has no effect.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from leret.core.errors import RunError
from leret.core.files import locked, read_uri
from leret.core.runs import Run
from leret.core.types import Sample, SamplingParams, State
from leret.sampling.store.schema import (
    ANSWER_COLUMNS,
    IN_ORDER,
    OUTAGE_SQL,
    PathStep,
    StateSamples,
    connect,
    dump,
    errors_of,
    sample_of,
    sample_row,
    state_of,
    state_row,
)

_FLUSH_ROWS = 4000
_FLUSH_S = 0.2
_PUT = {
    "states": "INSERT INTO states {} ON CONFLICT DO NOTHING",
    "samples": "INSERT INTO samples {} ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in ANSWER_COLUMNS)
    + f" WHERE samples.failure_kind IN ({OUTAGE_SQL})",
    "visits": "INSERT OR REPLACE INTO visits {}",
}
"""Statements in the order of references between tables."""
_REWARD_SQL = "UPDATE samples SET reward = ?, components = ? WHERE id = ? AND failure_kind IS NULL"
_N_COLUMNS = {"states": 5, "samples": 23, "visits": 7}
_DONE_SQL = (
    "SELECT question_id FROM visits WHERE policy_digest = ? AND outcome != 'next' EXCEPT "
    f"SELECT question_id FROM samples WHERE policy_digest = ? AND failure_kind IN ({OUTAGE_SQL})"
)


class Store:
    """States, samples and visits of a run, in a file that is created if missing; ``read_only`` takes no lock."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.path = path
        self._pending: dict[str, list[tuple[Any, ...]]] = {table: [] for table in _PUT}
        self._new_rewards: list[tuple[Any, ...]] = []
        self._name: int | None = None
        self._last_flush = time.monotonic()
        with ExitStack() as opening:
            if not read_only:
                busy = RunError(f"{path} is in use by another process; wait for it, or give another name")
                try:
                    opening.enter_context(locked(path.with_name(path.name + ".lock"), busy))
                except OSError as error:
                    message = f"{path} cannot be locked ({error}); name a writable run directory"
                    raise RunError(message) from error
            self._database = connect(path, read_only)
            self._open = opening.pop_all()

    def put_state(self, state: State) -> None:
        self._pending["states"].append(state_row(state))

    def put_samples(self, samples: Iterable[Sample], origin: SamplingParams) -> None:
        """Add samples, all or none; a stored sample is replaced only if it was an outage."""
        self._pending["samples"].extend(sample_row(sample, origin) for sample in samples)
        late = time.monotonic() - self._last_flush > _FLUSH_S
        if late or len(self._pending["samples"]) >= _FLUSH_ROWS:
            self.flush()

    def put_rewards(self, samples: Iterable[Sample], name: int | None = None) -> None:
        """Replace reward and components of samples with a reward, all or none.

        ``name`` identifies the sections of run.yaml that take effect then, see `leret.core.runs.Run.prepare`.
        """
        self._name = self._name if name is None else name
        self._new_rewards.extend((sample.reward, dump(sample.components), sample.id) for sample in samples)

    def put_visit(self, visit: PathStep) -> None:
        self._pending["visits"].append(visit)

    def flush(self) -> None:
        """Commit; a RunError (disk full, a row that breaks a rule) leaves the earlier commits."""
        self._last_flush = time.monotonic()
        if not any(self._pending.values()) and not self._new_rewards and self._name is None:
            return
        with errors_of(self.path), self._database:
            self._database.execute("BEGIN")
            for table, rows in self._pending.items():
                values = f"VALUES ({', '.join('?' * _N_COLUMNS[table])})"
                self._database.executemany(_PUT[table].format(values), rows)
            self._database.executemany(_REWARD_SQL, self._new_rewards)
            if self._name is not None:
                self._database.execute(f"PRAGMA application_id = {self._name}")
        self._new_rewards, self._name = [], None
        self._pending = {table: [] for table in _PUT}

    def merge(self, path: Path, question_ids: Iterable[str] | None = None) -> None:
        """Add another store's committed rows, or those of ``question_ids``, by the rules of `put_samples`."""
        self.flush()
        connect(path, read_only=True).close()  # refuses another schema
        where = "true" if question_ids is None else "question_id IN (SELECT value FROM json_each(?))"
        values = () if question_ids is None else (json.dumps(list(question_ids)),)
        with errors_of(path):
            self._database.execute("ATTACH ? AS other", (read_uri(path),))
            try:
                with self._database:
                    self._database.execute("BEGIN")
                    for table, put in _PUT.items():
                        self._database.execute(put.format(f"SELECT * FROM other.{table} WHERE {where}"), values)
            finally:
                self._database.execute("DETACH other")

    def close(self) -> None:
        with self._open, closing(self._database):
            self.flush()

    def samples_at(self, question_id: str, step: int, state_id: str, policy_digest: str) -> list[Sample]:
        where = "policy_digest = ? AND question_id = ? AND step = ? AND state_id = ?"
        values = (policy_digest, question_id, step, state_id)
        rows = self._read(f"SELECT * FROM samples s WHERE {where} {IN_ORDER}", values, flush=False)
        return [sample_of(row) for row in rows]

    def visits(self, policy_digest: str, question_id: str) -> list[PathStep]:
        sql = "SELECT * FROM visits WHERE question_id = ? AND policy_digest = ? ORDER BY step"
        return [PathStep(**row) for row in self._read(sql, (question_id, policy_digest), flush=False)]

    def done(self, policy_digest: str) -> set[str]:
        """Return the questions with a finished path and no outages."""
        return self._ids(_DONE_SQL, (policy_digest, policy_digest))

    def begun(self, policy_digest: str) -> set[str]:
        """Return the questions with samples that are not done."""
        sql = f"SELECT DISTINCT question_id FROM samples WHERE policy_digest = ? EXCEPT SELECT * FROM ({_DONE_SQL})"
        return self._ids(sql, (policy_digest,) * 3)

    def groups(self, policy_digest: str | None = None) -> Iterator[StateSamples]:
        """Yield samples by visit, ordered by policy, question, step, state, prompt and index."""
        self.flush()
        where, values = ("WHERE s.policy_digest = ?", (policy_digest,)) if policy_digest else ("", ())
        sql = (
            "SELECT s.*, t.predictor, t.inputs, t.messages, v.parent FROM samples s JOIN states t ON t.id = s.state_id "
            "LEFT JOIN visits v ON (v.question_id, v.step, v.policy_digest) = (s.question_id, s.step, s.policy_digest) "
            f"{where} {IN_ORDER}"
        )
        with errors_of(self.path):
            rows = self._database.execute(sql, values)
            for (digest, step, _), group in groupby(rows, lambda r: (r["policy_digest"], r["step"], r["state_id"])):
                members = list(group)
                first = members[0]
                state = state_of(first, step, first["parent"])
                yield StateSamples(state, digest, tuple(sample_of(row) for row in members))

    def finished(self, policy_digest: str | None = None) -> Iterator[StateSamples]:
        """Yield the `groups` of finished questions, at sampled predictors."""
        done = {digest: self.done(digest) for digest in self.policy_digests()}
        groups = (group for group in self.groups(policy_digest) if group.samples[0].is_sampled)
        return (group for group in groups if group.state.task_id in done[group.policy_digest])

    def question_ids(self) -> set[str]:
        return self._ids("SELECT DISTINCT question_id FROM states")

    def policy_digests(self) -> list[str]:
        sql = "SELECT policy_digest FROM samples GROUP BY policy_digest ORDER BY min(rowid)"
        return [row["policy_digest"] for row in self._read(sql)]

    def reward_range(self) -> tuple[float, float]:
        return tuple(self._read("SELECT ifnull(min(reward), 0.0), ifnull(max(reward), 0.0) FROM samples")[0])

    def counts(self, policy_digest: str | None = None) -> dict[str, int]:
        """Count ``states``, ``samples``, ``rewarded``, and failures by kind as ``failed_KIND``."""
        where, values = ("WHERE policy_digest = ?", (policy_digest,)) if policy_digest else ("", ())
        counts = self._read(
            "SELECT count(DISTINCT state_id || step) AS states, count(*) AS samples, count(reward) AS rewarded "
            f"FROM samples {where}",
            values,
        )[0]
        kinds = f"SELECT failure_kind AS kind, count(*) AS n FROM samples {where} GROUP BY 1 ORDER BY 1"
        failed = {f"failed_{row['kind']}": row["n"] for row in self._read(kinds, values) if row["kind"] is not None}
        return dict(counts) | failed

    def _read(self, sql: str, values: Sequence[Any] = (), flush: bool = True) -> list[sqlite3.Row]:
        if flush:
            self.flush()
        with errors_of(self.path):
            return self._database.execute(sql, values).fetchall()

    def _ids(self, sql: str, values: Sequence[Any] = ()) -> set[str]:
        return {row[0] for row in self._read(sql, values)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def stored_paths(run: Run) -> dict[str, dict[int, Sample]]:
    """Return the samples that continued their path, by question and step, of the policy that the run sampled last."""
    digest = run.manifest.policy_digest
    paths: dict[str, dict[int, Sample]] = {}
    with Store(run.store, read_only=True) as store:
        for group in store.finished(digest):
            chosen = {step.step: step.chosen for step in store.visits(group.policy_digest, group.state.task_id)}
            for sample in group.samples:
                if sample.id == chosen.get(group.state.step):
                    paths.setdefault(group.state.task_id, {})[group.state.step] = sample
    return paths
