"""The rules that the rows of a store keep, and the rows that break them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from leret.rewards import Measure, measure
from leret.sampling.records import OUTAGES
from leret.sampling.rollout import seed_of
from leret.types import digest

__all__ = ["Known", "sample_faults", "state_faults", "visit_faults"]

Faulty = Iterator[tuple[str, str]]
"""What is wrong, and with which row."""

_KINDS = ("parse", "prompt", *OUTAGES)
_OUTCOMES = ("next", "finished", "solved", "stuck")
_TOLERANCE = 1e-9
_SAMPLES = (
    "SELECT s.*, t.id AS known_state, t.question_id AS state_question FROM samples s "
    "LEFT JOIN states t ON t.id = s.state_id"
)
_VISITS = (
    "SELECT v.*, t.id AS known_state, t.question_id AS state_question, c.id AS known_chosen, "
    "c.state_id AS chosen_state, c.policy_digest AS chosen_policy, c.step AS chosen_step, "
    "b.chosen AS before_chosen, b.outcome AS before_outcome FROM visits v "
    "LEFT JOIN states t ON t.id = v.state_id LEFT JOIN samples c ON c.id = v.chosen "
    "LEFT JOIN visits b ON (b.question_id, b.step, b.policy_digest) = (v.question_id, v.step - 1, v.policy_digest)"
)


@dataclass
class Known:
    """What a run says its samples were made from; None is not known.

    Attributes:
        seed: of the run.
        reward: name of the measure.
        policies: digests of those that were sampled.
        prompts: of the bank, digests by name.
        gold: documents by question.
        n_recomputed: rewards that were computed again.
    """

    seed: int | None = None
    reward: str | None = None
    policies: set[str] | None = None
    prompts: Mapping[str, str] | None = None
    gold: Mapping[str, tuple[str, ...]] | None = None
    n_recomputed: int = 0


def state_faults(database: sqlite3.Connection) -> Faulty:
    """States whose id is not the digest of their content, or whose messages are none."""
    for row in database.execute("SELECT * FROM states"):
        name = row["id"]
        try:
            inputs, messages = json.loads(row["inputs"]), json.loads(row["messages"])
        except ValueError:
            yield "a state's inputs or messages are no JSON", name
            continue
        if digest(row["question_id"], row["predictor"], inputs) != name:
            yield "a state's id is not the digest of its question, predictor and inputs", name
        if not messages or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages):
            yield "a state's messages have not a role and a content each", name


def sample_faults(database: sqlite3.Connection, known: Known) -> Faulty:
    """Samples that break a rule."""
    value = measure(known.reward) if known.reward else None
    for row in database.execute(_SAMPLES):
        name = row["id"]
        for what in _identity(row, known):
            yield what, name
        try:
            parsed = {key: json.loads(row[key]) for key in ("outputs", "doc_ids", "scores", "components")}
        except ValueError:
            yield "a sample's outputs, ranking or components are no JSON", name
            continue
        for what in _content(row, parsed, known, value):
            yield what, name


def _identity(row: sqlite3.Row, known: Known) -> Iterator[str]:
    """Faults of what a sample was asked by."""
    if row["known_state"] is None:
        yield "a sample's state is missing"
    elif row["state_question"] != row["question_id"]:
        yield "a sample is of another question than its state"
    asked = (
        row["state_id"], row["step"], row["prompt_digest"], row["n"], row["seed"],
        row["temperature"], row["top_p"], row["max_tokens"], row["policy_digest"],
    )  # fmt: skip
    if digest(*asked) != row["id"]:
        yield "a sample's id is not the digest of what asked for it"
    parts = (row["state_id"], row["step"], row["prompt_digest"], row["n"])
    if known.seed is not None and seed_of(known.seed, *parts) != row["seed"]:
        yield "a sample's seed does not follow from the run's seed"
    if known.policies is not None and row["policy_digest"] not in known.policies:
        yield "a sample is of a policy that run.yaml does not list"
    if known.prompts is not None and known.prompts.get(row["prompt"]) != row["prompt_digest"]:
        yield "a sample was asked with another prompt than the one of that name in the bank"


def _content(row: sqlite3.Row, parsed: Mapping[str, Any], known: Known, value: Measure | None) -> Iterator[str]:
    """Faults of what came back."""
    doc_ids, scores, kind, reward = parsed["doc_ids"], parsed["scores"], row["failure_kind"], row["reward"]
    if (reward is None) == (kind is None):
        yield "a sample has both a reward and a failure, or neither"
        return
    if kind is not None:
        if kind not in _KINDS:
            yield f"a sample failed for an unknown reason ({kind})"
        if doc_ids or scores:
            yield "a failed sample has a ranking"
        return
    if row["completion"] is None or not parsed["outputs"]:
        yield "a scored sample has no completion, or nothing was parsed from it"
    if len(doc_ids) != len(scores) or len(set(doc_ids)) != len(doc_ids) or _rises(scores):
        yield "a sample's ranking is none: a document twice, scores that rise, or not one a document"
    if not 0 <= reward <= 1:
        yield "a reward is outside of 0 to 1"
    if known.reward in parsed["components"] and parsed["components"][known.reward] != reward:
        yield "a reward is not the component that it is made of"
    gold = (known.gold or {}).get(row["question_id"])
    if value is not None and gold:
        known.n_recomputed += 1
        if abs(value(doc_ids, gold) - reward) > _TOLERANCE:
            yield f"a reward is not the {known.reward} of its ranking"


def _rises(scores: Sequence[float]) -> bool:
    return any(after > before for before, after in pairwise(scores))


def visit_faults(database: sqlite3.Connection) -> Faulty:
    """Steps of a question's path that lead from nowhere, or to nowhere."""
    for row in database.execute(_VISITS):
        name = f"{row['question_id']} step {row['step']}"
        if row["known_state"] is None or row["state_question"] != row["question_id"]:
            yield "a visit's state is missing, or of another question", name
        if row["outcome"] not in _OUTCOMES:
            yield "a visit ends in no outcome that there is", name
        chosen = row["chosen"] is not None
        if chosen != (row["outcome"] in {"next", "finished"}):
            yield "a visit goes on without a chosen sample, or ends with one", name
        if chosen and row["known_chosen"] is None:
            yield "a visit's chosen sample is missing", name
        elif chosen and (row["chosen_state"], row["chosen_step"], row["chosen_policy"]) != (
            row["state_id"], row["step"], row["policy_digest"],
        ):  # fmt: skip
            yield "a visit's chosen sample is of another state, step or policy", name
        if row["step"] == 0 and row["parent"] is not None:
            yield "a first visit has a parent", name
        if row["step"] > 0 and (row["before_outcome"] != "next" or row["before_chosen"] != row["parent"]):
            yield "a visit does not follow from the one before", name
