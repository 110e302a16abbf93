"""Rows of the store, as values and as columns."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leret.types import Failure, Sample, State

__all__ = [
    "OUTAGES",
    "SCHEMA_SQL",
    "Group",
    "Origin",
    "Visit",
    "is_final",
    "sample_of",
    "sample_row",
    "state_of",
    "state_row",
    "storable",
]

OUTAGES = ("policy", "retrieval", "program")
"""Kinds of failure that say nothing about the completion; such a sample is tried again at the next resume."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who completed, and how: the same for all samples that one prompt of the bank gets in one round."""

    policy: str
    policy_digest: str
    prompt_digest: str
    temperature: float
    top_p: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Visit:
    """One step on the path of a question.

    Attributes:
        chosen: the sample that went on; None where none did.
        outcome: ``next`` (the path goes on), ``finished`` (the program returned), ``solved`` (every scored sample
            has all gold on top) or ``stuck`` (no sample has a reward).
    """

    question_id: str
    step: int
    policy_digest: str
    state_id: str
    parent: str | None
    chosen: str | None
    outcome: str


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one policy at one visit of a state, in the order of prompt and index."""

    state: State
    policy_digest: str
    samples: tuple[Sample, ...]


def is_final(sample: Sample) -> bool:
    """Whether a resume leaves this sample as it is."""
    return sample.failure is None or sample.failure.kind not in OUTAGES


SCHEMA_SQL = """
CREATE TABLE states (
    id TEXT PRIMARY KEY, question_id TEXT NOT NULL, predictor TEXT NOT NULL,
    inputs TEXT NOT NULL, messages TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE samples (
    id TEXT PRIMARY KEY, state_id TEXT NOT NULL, question_id TEXT NOT NULL, step INTEGER NOT NULL,
    prompt TEXT NOT NULL, n INTEGER NOT NULL, seed INTEGER NOT NULL,
    completion TEXT, outputs TEXT NOT NULL, doc_ids TEXT NOT NULL, scores TEXT NOT NULL,
    reward REAL, components TEXT NOT NULL, failure_kind TEXT, failure_message TEXT,
    n_prompt_tokens INTEGER, n_completion_tokens INTEGER,
    policy TEXT NOT NULL, policy_digest TEXT NOT NULL, prompt_digest TEXT NOT NULL,
    temperature REAL NOT NULL, top_p REAL NOT NULL, max_tokens INTEGER NOT NULL
);
CREATE INDEX samples_in_order ON samples (policy_digest, question_id, step, state_id);
CREATE INDEX samples_to_try_again ON samples (policy_digest, question_id)
    WHERE failure_kind IN ('policy', 'retrieval', 'program');
CREATE TABLE visits (
    question_id TEXT NOT NULL, step INTEGER NOT NULL, policy_digest TEXT NOT NULL,
    state_id TEXT NOT NULL, parent TEXT, chosen TEXT, outcome TEXT NOT NULL,
    PRIMARY KEY (question_id, step, policy_digest)
) WITHOUT ROWID;
"""


def state_row(state: State) -> tuple[Any, ...]:
    """Columns of ``states``."""
    return state.id, state.question_id, state.predictor, _dump(state.inputs), _dump(state.messages)


def state_of(row: sqlite3.Row, step: int, parent: str | None) -> State:
    """Undoes `state_row`; where the state stood on its path comes from the visit."""
    messages = tuple(json.loads(row["messages"]))
    inputs = json.loads(row["inputs"])
    return State(row["state_id"], row["question_id"], step, row["predictor"], inputs, messages, parent)


def sample_row(sample: Sample, origin: Origin) -> tuple[Any, ...]:
    """Columns of ``samples``."""
    failure = sample.failure
    return (
        sample.id, sample.state_id, sample.question_id, sample.step, sample.prompt, sample.index, sample.seed,
        sample.completion, _dump(sample.outputs), _dump(sample.doc_ids), _dump(sample.scores),
        sample.reward, _dump(sample.components), failure and failure.kind, failure and storable(failure.message),
        sample.n_prompt_tokens, sample.n_completion_tokens,
        origin.policy, origin.policy_digest, origin.prompt_digest, origin.temperature, origin.top_p, origin.max_tokens,
    )  # fmt: skip


def sample_of(row: sqlite3.Row) -> Sample:
    """Undoes `sample_row`."""
    kind = row["failure_kind"]
    return Sample(
        id=row["id"],
        state_id=row["state_id"],
        question_id=row["question_id"],
        step=row["step"],
        prompt=row["prompt"],
        index=row["n"],
        seed=row["seed"],
        completion=row["completion"],
        outputs=json.loads(row["outputs"]),
        doc_ids=tuple(json.loads(row["doc_ids"])),
        scores=tuple(json.loads(row["scores"])),
        reward=row["reward"],
        components=json.loads(row["components"]),
        failure=None if kind is None else Failure(kind, row["failure_message"]),
        n_prompt_tokens=row["n_prompt_tokens"],
        n_completion_tokens=row["n_completion_tokens"],
    )


def storable(text: str) -> str:
    """Text that can be written as UTF-8: half a surrogate pair, which a server may send, becomes ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


_dump: Callable[[Mapping[str, Any] | Sequence[Any]], str] = json.JSONEncoder(separators=(",", ":")).encode
"""One encoder for all rows: ``json.dumps`` makes a new one at every call that does not take its defaults."""
