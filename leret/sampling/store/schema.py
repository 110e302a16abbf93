"""The tables of the store, with the rules of a row as named constraints, its rows as values, and its opening."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple

from leret.core.errors import RunError
from leret.core.files import read_uri
from leret.core.types import OUTAGES, Failure, Sample, SamplingParams, State, json_encoder, storable

STORE_SCHEMA = 2

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
    temperature REAL NOT NULL, top_p REAL NOT NULL, max_tokens INTEGER NOT NULL,
    CONSTRAINT "a score for each document" CHECK (json_array_length(scores) = json_array_length(doc_ids)),
    CONSTRAINT "either a reward or a failure" CHECK ((reward IS NULL) = (failure_kind IS NOT NULL)),
    CONSTRAINT "a reward is of a completion" CHECK (reward IS NULL OR completion IS NOT NULL),
    FOREIGN KEY (state_id, question_id) REFERENCES states (id, question_id)
) STRICT;
CREATE UNIQUE INDEX samples_in_order ON samples (policy_digest, question_id, step, state_id, prompt, n);
CREATE INDEX samples_to_try_again ON samples (policy_digest, question_id) WHERE failure_kind IN ({OUTAGE_SQL});
CREATE TABLE visits (
    question_id TEXT NOT NULL, step INTEGER NOT NULL, policy_digest TEXT NOT NULL, state_id TEXT NOT NULL,
    parent TEXT REFERENCES samples (id), chosen TEXT REFERENCES samples (id),
    outcome TEXT NOT NULL CONSTRAINT "an outcome is known" CHECK (outcome IN ('next', 'finished', 'solved', 'stuck')),
    PRIMARY KEY (question_id, step, policy_digest),
    CONSTRAINT "a path goes on by a sample" CHECK ((chosen IS NULL) = (outcome IN ('solved', 'stuck'))),
    CONSTRAINT "the first step alone has no parent" CHECK ((parent IS NULL) = (step = 0)),
    FOREIGN KEY (state_id, question_id) REFERENCES states (id, question_id)
) STRICT, WITHOUT ROWID;
"""

ANSWER_COLUMNS = (
    "completion", "outputs", "doc_ids", "scores", "reward", "components", "failure_kind", "failure_message",
    "n_prompt_tokens", "n_completion_tokens",
)  # fmt: skip
"""Columns of ``samples`` that a second try may change."""

IN_ORDER = "ORDER BY s.policy_digest, s.question_id, s.step, s.state_id, length(s.prompt), s.prompt, s.n"

_LEAST_FREE = 2**20
"""Bytes of free disk. On a full disk SQLite may report "disk I/O error", since even a reader makes a 32 KiB file."""


class PathStep(NamedTuple):
    """One step on the path of a question.

    ``chosen`` is the sample that continued the path; ``outcome`` is ``next`` (the path continues), ``finished`` (the
    program returned), ``solved`` (every scored sample has all gold on top) or ``stuck`` (no sample has a reward).
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
    """The group of a state: all samples of one policy at one visit, in the order of prompt and index."""

    state: State
    policy_digest: str
    samples: tuple[Sample, ...]


def state_row(state: State) -> tuple[Any, ...]:
    """Return the columns of ``states``."""
    return state.id, state.task_id, state.predictor, dump(state.inputs), dump(state.messages)


def state_of(row: sqlite3.Row, step: int, parent: str | None) -> State:
    """Undo `state_row`; the visit gives the state's place on its path."""
    inputs, messages = json.loads(row["inputs"]), tuple(json.loads(row["messages"]))
    return State(row["state_id"], row["question_id"], step, row["predictor"], inputs, messages, parent)


def sample_row(sample: Sample, origin: SamplingParams) -> tuple[Any, ...]:
    """Return the columns of ``samples``."""
    failure = sample.failure
    return (
        sample.id, sample.state_id, sample.task_id, sample.step, sample.prompt, sample.index, sample.seed,
        sample.completion, dump(sample.outputs), dump(sample.doc_ids), dump(sample.scores),
        sample.reward, dump(sample.components), failure and failure.kind, failure and storable(failure.message),
        sample.n_prompt_tokens, sample.n_completion_tokens,
        origin.policy, origin.policy_digest, origin.prompt_digest, origin.temperature, origin.top_p, origin.max_tokens,
    )  # fmt: skip


def sample_of(row: sqlite3.Row) -> Sample:
    """Undo `sample_row`."""
    kind = row["failure_kind"]
    return Sample(
        row["id"], row["state_id"], row["question_id"], row["step"], row["prompt"], row["n"], row["seed"],
        row["completion"], json.loads(row["outputs"]), tuple(json.loads(row["doc_ids"])),
        tuple(json.loads(row["scores"])), row["reward"], json.loads(row["components"]),
        None if kind is None else Failure(kind, row["failure_message"]),
        row["n_prompt_tokens"], row["n_completion_tokens"],
    )  # fmt: skip


dump = json_encoder(separators=(",", ":"))


def connect(path: Path, read_only: bool) -> sqlite3.Connection:
    """Open the store's file, with its tables; RunError if it is missing (read-only), damaged, or of another schema."""
    if read_only and not path.is_file():
        raise RunError(f"{path} does not exist; run `leret sample RECIPE --run {path.parent}` first")
    uri = read_uri(path) if read_only else f"{path.absolute().as_uri()}?mode=rwc"
    with errors_of(path):
        database = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=30)
        database.row_factory = sqlite3.Row
        version = database.execute("PRAGMA user_version").fetchone()[0]
        empty = not database.execute("SELECT 1 FROM sqlite_master").fetchone()
        if version == 0 and empty and not read_only:
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(f"BEGIN;{SCHEMA_SQL}PRAGMA user_version = {STORE_SCHEMA};COMMIT;")
            version = STORE_SCHEMA
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA foreign_keys = ON")
    if version != STORE_SCHEMA:
        database.close()
        raise RunError(
            f"{path} has schema {version}, this leret reads schema {STORE_SCHEMA}; stores are not converted: "
            "use the leret that wrote it, or sample again into a new run directory"
        )
    return database


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Turn SQLite's errors for this file into RunErrors."""
    try:
        yield
    except sqlite3.Error as error:
        raise run_error(path, error) from error


def run_error(path: Path, error: sqlite3.Error) -> RunError:
    """Return SQLite's error with advice."""
    text = str(error)
    again = "run the same command again, which continues from here"
    if "full" in text or ("disk I/O" in text and disk_usage(path.parent).free < _LEAST_FREE):
        return RunError(f"{path} cannot be written: the disk is full; free some space and {again}")
    if isinstance(error, sqlite3.IntegrityError):
        return RunError(f"{path} refuses a row: {text}; nothing was changed").failed()
    if "readonly" in text or "unable to open" in text:
        return RunError(f"{path} cannot be opened for this ({text}); name a run directory that you may read and write")
    if "not a database" in text or "malformed" in text:
        return RunError(f"{path} is damaged ({text}); restore it, or delete it to sample again")
    if "locked" in text:
        return RunError(f"{path} is held by another process ({text}); wait for it, or name another run")
    return RunError(f"{path} failed: {text}; check the disk and {again}")
