"""The store: states and samples in one SQLite file, written in batches, read by id or in a fixed order.

One process writes; other processes may read. The samples of a prompt at a state share a
transaction, so a kill loses all or none of the samples. Ids are digests of the row's content, so
adding or merging a row twice has no effect.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple, Self

from leret.core.errors import RunError
from leret.core.files import locked, read_uri
from leret.core.runs import Run
from leret.core.types import OUTAGES, Failure, Sample, SamplingParams, State, json_encoder, storable

STORE_SCHEMA = 4

TOKEN_COLUMNS = (
    "token_ids BLOB",
    'logprobs BLOB CONSTRAINT "one log-probability per token" CHECK (length(logprobs) IS length(token_ids))',
    "finish_reason TEXT CONSTRAINT \"a finish reason is stop or length\" CHECK (finish_reason IN ('stop', 'length'))",
    "sampled_ids BLOB",
)
"""Columns of ``samples`` that schema 2 lacks. Ids are int32 and log-probabilities float32, little-endian.

``token_ids`` and ``logprobs`` are null without `sampling.token_ids`; the ids are then in
``sampled_ids``.
"""

_MISSING_COLUMNS = {2: TOKEN_COLUMNS, 3: TOKEN_COLUMNS[2:]}
"""Columns that a store of an older schema lacks."""

OUTAGE_SQL = ", ".join(f"'{kind}'" for kind in OUTAGES)

SCHEMA_SQL = f"""
CREATE TABLE states (
    id TEXT NOT NULL, question_id TEXT NOT NULL, predictor TEXT NOT NULL,
    inputs TEXT NOT NULL CONSTRAINT "inputs are a JSON object" CHECK (json_type(inputs) = 'object'),
    messages TEXT NOT NULL CONSTRAINT "messages are a JSON array" CHECK (json_type(messages) = 'array'),
    PRIMARY KEY (id, question_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE samples (
    id TEXT NOT NULL PRIMARY KEY, state_id TEXT NOT NULL, question_id TEXT NOT NULL, step INTEGER NOT NULL,
    prompt TEXT NOT NULL, n INTEGER NOT NULL, seed INTEGER NOT NULL, completion TEXT,
    outputs TEXT NOT NULL CONSTRAINT "outputs are a JSON object" CHECK (json_type(outputs) = 'object'),
    doc_ids TEXT NOT NULL CONSTRAINT "doc_ids are a JSON array" CHECK (json_type(doc_ids) = 'array'),
    scores TEXT NOT NULL,
    reward REAL CONSTRAINT "a reward is a finite number" CHECK (abs(reward) < 1e308),
    components TEXT NOT NULL CONSTRAINT "components are a JSON object" CHECK (json_type(components) = 'object'),
    failure_kind TEXT CONSTRAINT "a failure is of a known kind"
        CHECK (failure_kind IN ('parse', 'prompt', {OUTAGE_SQL})),
    failure_message TEXT, n_prompt_tokens INTEGER, n_completion_tokens INTEGER,
    policy TEXT NOT NULL, policy_digest TEXT NOT NULL, prompt_digest TEXT NOT NULL,
    temperature REAL NOT NULL, top_p REAL NOT NULL, max_tokens INTEGER NOT NULL, {", ".join(TOKEN_COLUMNS)},
    CONSTRAINT "one score per document" CHECK (json_array_length(scores) = json_array_length(doc_ids)),
    CONSTRAINT "either a reward or a failure" CHECK ((reward IS NULL) = (failure_kind IS NOT NULL)),
    CONSTRAINT "a reward needs a completion" CHECK (reward IS NULL OR completion IS NOT NULL),
    FOREIGN KEY (state_id, question_id) REFERENCES states (id, question_id)
) STRICT;
CREATE UNIQUE INDEX samples_in_order ON samples (policy_digest, question_id, step, state_id, prompt, n);
CREATE INDEX samples_to_try_again ON samples (policy_digest, question_id) WHERE failure_kind IN ({OUTAGE_SQL});
CREATE TABLE visits (
    question_id TEXT NOT NULL, step INTEGER NOT NULL, policy_digest TEXT NOT NULL, state_id TEXT NOT NULL,
    parent TEXT REFERENCES samples (id), chosen TEXT REFERENCES samples (id),
    outcome TEXT NOT NULL CONSTRAINT "the outcome is valid" CHECK (outcome IN ('next', 'finished', 'solved', 'stuck')),
    PRIMARY KEY (question_id, step, policy_digest),
    CONSTRAINT "only solved or stuck steps choose none" CHECK ((chosen IS NULL) = (outcome IN ('solved', 'stuck'))),
    CONSTRAINT "only the first step has no parent" CHECK ((parent IS NULL) = (step = 0)),
    FOREIGN KEY (state_id, question_id) REFERENCES states (id, question_id)
) STRICT, WITHOUT ROWID;
"""

ANSWER_COLUMNS = (
    "completion", "outputs", "doc_ids", "scores", "reward", "components", "failure_kind", "failure_message",
    "n_prompt_tokens", "n_completion_tokens", "token_ids", "logprobs", "finish_reason", "sampled_ids",
)  # fmt: skip
"""Columns of ``samples`` that a retry may change."""

IN_ORDER = (
    "ORDER BY s.policy_digest, s.question_id, s.step, s.state_id, length(s.prompt), s.prompt, s.n"
)

_LEAST_FREE = 2**20
"""Free bytes below which "disk I/O error" means a full disk: even SQLite's readers create a 32 KiB file."""
_FLUSH_ROWS = 4000
_FLUSH_S = 0.2
_PUT = {
    "states": "INSERT INTO states {} ON CONFLICT DO NOTHING",
    "samples": "INSERT INTO samples {} ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in ANSWER_COLUMNS)
    + f" WHERE samples.failure_kind IN ({OUTAGE_SQL})",
    "visits": "INSERT OR REPLACE INTO visits {}",
}
"""Insert statements; referenced tables come first."""
_REWARD_SQL = "UPDATE samples SET reward = ?, components = ? WHERE id = ? AND failure_kind IS NULL"
_N_COLUMNS = {"states": 5, "samples": 27, "visits": 7}
_DONE_SQL = (
    "SELECT question_id FROM visits WHERE policy_digest = ? AND outcome != 'next' EXCEPT "
    f"SELECT question_id FROM samples WHERE policy_digest = ? AND failure_kind IN ({OUTAGE_SQL})"
)


class PathStep(NamedTuple):
    """One step on a question's path.

    ``chosen`` is the sample that continued the path. ``outcome`` is ``next`` (the path continues),
    ``finished`` (the program returned), ``solved`` (every rewarded sample ranks all gold documents
    first) or ``stuck`` (no rewards).
    """

    question_id: str
    step: int
    policy_digest: str
    state_id: str
    parent: str | None
    chosen: str | None
    outcome: str


@dataclass(frozen=True, slots=True)
class StateSamples:
    """A state's group: all samples of a policy at one visit, ordered by prompt and index."""

    state: State
    policy_digest: str
    samples: tuple[Sample, ...]


def state_row(state: State) -> tuple[Any, ...]:
    """Return a state as a row of ``states``."""
    return state.id, state.task_id, state.predictor, dump(state.inputs), dump(state.messages)


def sample_row(sample: Sample, origin: SamplingParams) -> tuple[Any, ...]:
    """Return a sample as a row of ``samples``."""
    failure = sample.failure
    ids = _packed(sample.token_ids, "i")
    sampled_ids = None
    if sample.logprobs is None:
        sampled_ids = ids
        ids = None
    return (
        sample.id, sample.state_id, sample.task_id, sample.step, sample.prompt, sample.index, sample.seed,
        sample.completion, dump(sample.outputs), dump(sample.doc_ids), dump(sample.scores),
        sample.reward, dump(sample.components), failure and failure.kind, failure and storable(failure.message),
        sample.n_prompt_tokens, sample.n_completion_tokens,
        origin.policy, origin.policy_digest, origin.prompt_digest, origin.temperature, origin.top_p, origin.max_tokens,
        ids, _packed(sample.logprobs, "f"), sample.finish_reason, sampled_ids,
    )  # fmt: skip


def sample_of(row: sqlite3.Row) -> Sample:
    """Return the sample of a row; inverse of `sample_row`.

    A row without a finish reason, from an older version of leret, was cut if it has ``max_tokens``
    tokens.
    """
    columns = dict(row)  # schemas 2 and 3 lack some
    kind = row["failure_kind"]
    logprobs = columns.get("logprobs")
    ids = columns.get("token_ids") or columns.get("sampled_ids")
    token_ids = None if ids is None else _unpacked(ids, "i")
    token_logprobs = None if logprobs is None else _unpacked(logprobs, "f")
    finish = columns.get("finish_reason")
    if finish is None and (row["n_completion_tokens"] or 0) >= row["max_tokens"]:
        finish = "length"
    return Sample(
        row["id"], row["state_id"], row["question_id"], row["step"], row["prompt"], row["n"], row["seed"],
        row["completion"], json.loads(row["outputs"]), tuple(json.loads(row["doc_ids"])),
        tuple(json.loads(row["scores"])), row["reward"], json.loads(row["components"]),
        None if kind is None else Failure(kind, row["failure_message"]),
        row["n_prompt_tokens"], row["n_completion_tokens"], token_ids, token_logprobs, finish,
    )  # fmt: skip


def _packed(values: Sequence[float] | None, kind: str) -> bytes | None:
    if values is None:
        return None
    return struct.pack(f"<{len(values)}{kind}", *values)


def _unpacked(blob: bytes, kind: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{len(blob) // 4}{kind}", blob)


dump = json_encoder(separators=(",", ":"))


class Store:
    """States, samples and visits of a run.

    A missing file is created; ``read_only`` takes no lock.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.path = path
        self._pending: dict[str, list[tuple[Any, ...]]] = {table: [] for table in _PUT}
        self._new_rewards: list[tuple[Any, ...]] = []
        self._name: int | None = None
        self._last_flush = time.monotonic()
        with ExitStack() as opening:
            if not read_only:
                busy = RunError(
                    f"{path} is in use by another process; wait, or name another run directory"
                )
                opening.enter_context(locked(path.with_name(path.name + ".lock"), busy))
            self._database = connect(path, read_only)
            self._open = opening.pop_all()

    def put_state(self, state: State) -> None:
        self._pending["states"].append(state_row(state))

    def put_samples(self, samples: Iterable[Sample], origin: SamplingParams) -> None:
        """Add samples in one transaction.

        A stored sample is replaced only if it failed in an outage.
        """
        self._pending["samples"].extend(sample_row(sample, origin) for sample in samples)
        late = time.monotonic() - self._last_flush > _FLUSH_S
        if late or len(self._pending["samples"]) >= _FLUSH_ROWS:
            self.flush()

    def put_rewards(self, samples: Iterable[Sample], name: int | None = None) -> None:
        """Replace the reward and components of rewarded samples in one transaction.

        The same commit puts into effect the run.yaml sections that `leret.core.runs.Run.prepare`
        returned ``name`` for.
        """
        if name is not None:
            self._name = name
        for sample in samples:
            self._new_rewards.append((sample.reward, dump(sample.components), sample.id))

    def put_visit(self, visit: PathStep) -> None:
        self._pending["visits"].append(visit)

    def flush(self) -> None:
        """Commit.

        Raises:
            RunError: the disk is full or a row breaks a constraint. Earlier commits remain.
        """
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
        self._new_rewards = []
        self._name = None
        self._pending = {table: [] for table in _PUT}

    def merge(self, path: Path, question_ids: Iterable[str] | None = None) -> None:
        """Add another store's committed rows, or those of ``question_ids``.

        Rows are replaced as in `put_samples`.
        """
        self.flush()
        with closing(connect(path, read_only=True)) as source:  # raises if the schema differs
            n_columns = len(source.execute("PRAGMA table_info(samples)").fetchall())
        rest = {"samples": ", NULL" * (_N_COLUMNS["samples"] - n_columns)}
        where = "true"
        values: tuple[str, ...] = ()
        if question_ids is not None:
            where = "question_id IN (SELECT value FROM json_each(?))"
            values = (json.dumps(list(question_ids)),)
        with errors_of(path):
            self._database.execute("ATTACH ? AS other", (read_uri(path),))
            try:
                with self._database:
                    self._database.execute("BEGIN")
                    for table, put in _PUT.items():
                        rows = f"SELECT *{rest.get(table, '')} FROM other.{table} WHERE {where}"
                        self._database.execute(put.format(rows), values)
            finally:
                self._database.execute("DETACH other")

    def close(self) -> None:
        with self._open, closing(self._database):
            self.flush()

    def samples_at(
        self, question_id: str, step: int, state_id: str, policy_digest: str
    ) -> list[Sample]:
        where = "policy_digest = ? AND question_id = ? AND step = ? AND state_id = ?"
        values = (policy_digest, question_id, step, state_id)
        rows = self._read(f"SELECT * FROM samples s WHERE {where} {IN_ORDER}", values, flush=False)
        return [sample_of(row) for row in rows]

    def visits(self, policy_digest: str, question_id: str) -> list[PathStep]:
        sql = "SELECT * FROM visits WHERE question_id = ? AND policy_digest = ? ORDER BY step"
        rows = self._read(sql, (question_id, policy_digest), flush=False)
        return [PathStep(**row) for row in rows]

    def done(self, policy_digest: str) -> set[str]:
        """Return the questions with a finished path and no sample that failed in an outage."""
        return self._ids(_DONE_SQL, (policy_digest, policy_digest))

    def groups(self, policy_digest: str | None = None) -> Iterator[StateSamples]:
        """Yield each visit's samples by policy, question, step, state, prompt and index."""
        self.flush()
        where = "WHERE s.policy_digest = ?" if policy_digest else ""
        values = (policy_digest,) if policy_digest else ()
        sql = (
            "SELECT s.*, t.predictor, t.inputs, t.messages, v.parent FROM samples s JOIN states t ON t.id = s.state_id "
            "LEFT JOIN visits v ON (v.question_id, v.step, v.policy_digest) = (s.question_id, s.step, s.policy_digest) "
            f"{where} {IN_ORDER}"
        )
        with errors_of(self.path):
            rows = self._database.execute(sql, values)
            for (digest, step, _), group in groupby(
                rows, itemgetter("policy_digest", "step", "state_id")
            ):
                members = list(group)
                row = members[0]
                inputs = json.loads(row["inputs"])
                messages = tuple(json.loads(row["messages"]))
                names = row["state_id"], row["question_id"], step, row["predictor"]
                state = State(*names, inputs, messages, row["parent"])
                yield StateSamples(state, digest, tuple(map(sample_of, members)))

    def finished(self, policy_digest: str | None) -> Iterator[StateSamples]:
        """Yield the `groups` of sampled predictors in a policy's finished questions; none for None."""
        done = self.done(policy_digest or "")
        for group in self.groups(policy_digest):
            if group.samples[0].is_sampled and group.state.task_id in done:
                yield group

    def question_ids(self) -> set[str]:
        return self._ids("SELECT DISTINCT question_id FROM states")

    def sample_ids(self) -> list[str]:
        """Return the ids of all samples that did not fail in an outage, sorted."""
        sql = f"SELECT id FROM samples WHERE ifnull(failure_kind, '') NOT IN ({OUTAGE_SQL})"
        return sorted(self._ids(sql))

    def reward_range(self) -> tuple[float, float]:
        sql = "SELECT ifnull(min(reward), 0.0), ifnull(max(reward), 0.0) FROM samples"
        [row] = self._read(sql)
        return tuple(row)

    def counts(self, policy_digest: str | None = None) -> dict[str, int]:
        """Count ``states``, ``samples``, ``rewarded``, and failures by kind as ``failed_KIND``."""
        where = "WHERE policy_digest = ?" if policy_digest else ""
        values = (policy_digest,) if policy_digest else ()
        [row] = self._read(
            "SELECT count(DISTINCT state_id || step) AS states, count(*) AS samples, "
            f"count(reward) AS rewarded FROM samples {where}",
            values,
        )
        counts = dict(row)
        failures = self._read(
            "SELECT failure_kind AS kind, count(*) AS n FROM samples "
            f"{where} GROUP BY 1 ORDER BY 1",
            values,
        )
        for failure in failures:
            if failure["kind"] is not None:
                counts[f"failed_{failure['kind']}"] = failure["n"]
        return counts

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
    """Return the last policy's samples on finished paths, by question and step."""
    digest = run.manifest.policy_digest
    paths: dict[str, dict[int, Sample]] = {}
    with Store(run.store, read_only=True) as store:
        for group in store.finished(digest):
            state = group.state
            visits = store.visits(group.policy_digest, state.task_id)
            chosen = {visit.step: visit.chosen for visit in visits}
            for sample in group.samples:
                if sample.id == chosen.get(state.step):
                    path = paths.setdefault(state.task_id, {})
                    path[state.step] = sample
    return paths


def connect(path: Path, read_only: bool) -> sqlite3.Connection:
    """Open or create a store.

    RunError if it is damaged, has another schema, or is missing with ``read_only``.

    A store of an older schema gets the columns that it lacks; with ``read_only`` it is read without
    them.
    """
    if read_only and not path.is_file():
        raise RunError(
            f"{path} does not exist; run `leret sample RECIPE --run {path.parent}` first"
        )
    uri = read_uri(path) if read_only else f"{path.absolute().as_uri()}?mode=rwc"
    with errors_of(path):
        database = sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, timeout=30
        )
        database.row_factory = sqlite3.Row
        version = database.execute("PRAGMA user_version").fetchone()[0]
        empty = not database.execute("SELECT 1 FROM sqlite_master").fetchone()
        if version == 0 and empty and not read_only:
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(
                f"BEGIN;{SCHEMA_SQL}PRAGMA user_version = {STORE_SCHEMA};COMMIT;"
            )
            version = STORE_SCHEMA
        if version in _MISSING_COLUMNS and not read_only:
            columns = _MISSING_COLUMNS[version]
            added = "".join(f"ALTER TABLE samples ADD COLUMN {column};" for column in columns)
            database.executescript(f"BEGIN;{added}PRAGMA user_version = {STORE_SCHEMA};COMMIT;")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA foreign_keys = ON")
    if version not in {*_MISSING_COLUMNS, STORE_SCHEMA}:
        database.close()
        raise RunError(
            f"{path} has schema {version}, but this version of leret reads schema {STORE_SCHEMA} (or 2, 3); "
            "use the version that wrote the store, or sample again into a new run directory"
        )
    return database


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Raise SQLite errors for a store as RunError."""
    try:
        yield
    except sqlite3.Error as error:
        raise run_error(path, error) from error


def run_error(path: Path, error: sqlite3.Error) -> RunError:
    """Return the RunError for an SQLite error, with advice."""
    text = str(error)
    again = "run the same command again to continue"
    if "full" in text or ("disk I/O" in text and disk_usage(path.parent).free < _LEAST_FREE):
        return RunError(f"{path} cannot be written: the disk is full; free some space and {again}")
    if isinstance(error, sqlite3.IntegrityError):
        return RunError(
            f"{path} rejected a row ({text}); the store is unchanged; run `leret store check`"
        ).failed()
    if "not a database" in text or "malformed" in text:
        return RunError(f"{path} is damaged ({text}); restore it, or delete it to sample again")
    return RunError(f"{path} failed: {text}; check the disk and {again}")
