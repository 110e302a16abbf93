"""The rules that the rows of a store keep, and the rows that break them."""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from leret.config.sampling import SamplingRecipe
from leret.core.errors import LeretError, RunError
from leret.core.runs import Run
from leret.core.types import Outcome, Passage, Task, digest
from leret.rewards import Reward, reward
from leret.sampling.rollouts.rollout import seed_of
from leret.sampling.store.merge import leftovers
from leret.sampling.store.schema import OUTAGES, SCHEMA_SQL, STORE_SCHEMA, run_error

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
        gold: questions with gold documents, by id.
        n_recomputed: rewards that were computed again.
    """

    seed: int | None = None
    reward: str | None = None
    policies: set[str] | None = None
    prompts: Mapping[str, str] | None = None
    gold: Mapping[str, Task] | None = None
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
    value = reward(known.reward) if known.reward else None
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


def _content(row: sqlite3.Row, parsed: Mapping[str, Any], known: Known, value: Reward | None) -> Iterator[str]:
    """Faults of what came back."""
    doc_ids, scores, kind, stored = parsed["doc_ids"], parsed["scores"], row["failure_kind"], row["reward"]
    if (stored is None) == (kind is None):
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
    if not 0 <= stored <= 1:
        yield "a reward is outside of 0 to 1"
    if known.reward in parsed["components"] and parsed["components"][known.reward] != stored:
        yield "a reward is not the component that it is made of"
    gold = (known.gold or {}).get(row["question_id"])
    if value is not None and gold:
        known.n_recomputed += 1
        ranking = tuple(Passage(doc_id, "", "", 0.0) for doc_id in doc_ids)
        if abs((value(Outcome(gold, ranking=ranking)) or 0.0) - stored) > _TOLERANCE:
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


pass


_SHOWN = 3


@dataclass
class Fault:
    """One kind of fault.

    Attributes:
        what: in words.
        count: rows that have it.
        examples: some of them.
    """

    what: str
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        more = f" ({self.count:,} rows)" if self.count > 1 else ""
        named = f": {', '.join(self.examples)}" if self.examples else ""
        return f"{self.what}{more}{named}"


@dataclass
class StoreReport:
    """What a store holds, and what is wrong with it.

    Attributes:
        notes: what could not be checked, and why; what is unusual and no fault.
    """

    states: int = 0
    samples: int = 0
    visits: int = 0
    scored: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    rewards_recomputed: int = 0
    bytes: int = 0
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def check_store(run: Run) -> StoreReport:
    """Check a run's store; it may be in use.

    Raises:
        RunError: there is no store, it cannot be opened, or it is of another schema.
    """
    report = StoreReport(bytes=_size(run.store))
    with closing(open_unwritten(run.store)) as database:
        try:
            broken = [row[0] for row in database.execute("PRAGMA integrity_check(5)") if row[0] != "ok"]
            broken += _other_tables(database)
            if broken:
                report.faults = [Fault("SQLite finds the file damaged; restore it", len(broken), broken[:_SHOWN])]
                return report
            _count(database, report)
            known = _known(run, report)
            faults: dict[str, Fault] = {}
            for rows in (state_faults(database), sample_faults(database, known), visit_faults(database)):
                _gather(rows, faults)
            report.faults = list(faults.values())
            report.rewards_recomputed = known.n_recomputed
        except sqlite3.DatabaseError as error:
            raise run_error(run.store, error) from error
    left = leftovers(run.workers)
    if left:
        report.notes.append(f"{len(left)} stores of workers are not merged yet; the next `leret sample` takes them in")
    return report


def open_unwritten(path: Path) -> sqlite3.Connection:
    """A store's file, opened so that nothing is written beside it either.

    Raises:
        RunError: it is missing, damaged, or of another schema.
    """
    if not path.is_file():
        raise RunError(f"{path} does not exist; run `leret sample RECIPE --run {path.parent}` first")
    log = path.with_name(path.name + "-wal")
    still = not _in_use(path) and not (log.exists() and log.stat().st_size)
    # A reader makes files for the log beside a database that has one; of a file at rest it need not.
    mode = "mode=ro&immutable=1" if still else "mode=ro"
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None, timeout=30)
        database.row_factory = sqlite3.Row
        version = database.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.Error as error:
        raise run_error(path, error) from error
    if version != STORE_SCHEMA:
        database.close()
        raise RunError(
            f"{path} is a store of schema {version}, this leret reads schema {STORE_SCHEMA}; use the one that wrote it"
        )
    database.execute("BEGIN")  # one view of the store, whatever is added meanwhile
    return database


def _in_use(path: Path) -> bool:
    try:
        with path.with_name(path.name + ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*") if file.suffix != ".lock")


def _other_tables(database: sqlite3.Connection) -> list[str]:
    """Tables whose columns are not those of the schema."""

    def columns(of: sqlite3.Connection) -> dict[str, list[str]]:
        names = [row[0] for row in of.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
        return {name: [row[1] for row in of.execute(f"PRAGMA table_info({name})")] for name in names}

    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript(SCHEMA_SQL)
        wanted = columns(model)
    found = columns(database)
    return [f"table {name} has not its columns" for name in wanted if found.get(name) != wanted[name]]


def _count(database: sqlite3.Connection, report: StoreReport) -> None:
    for table in ("states", "samples", "visits"):
        setattr(report, table, database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    report.scored = database.execute("SELECT count(reward) FROM samples").fetchone()[0]
    kinds = "SELECT failure_kind, count(*) FROM samples WHERE failure_kind IS NOT NULL GROUP BY 1 ORDER BY 1"
    report.failed = {row[0]: row[1] for row in database.execute(kinds)}


def _known(run: Run, report: StoreReport) -> Known:
    """What the run says its samples were made from, as far as it can be read."""
    known = Known()
    try:
        manifest = run.manifest()
        section = manifest.get("sampling")
    except RunError as error:
        report.notes.append(f"seeds, prompts and rewards are not checked: {error}")
        return known
    if not isinstance(section, Mapping):
        report.notes.append(f"seeds, prompts and rewards are not checked: {run.manifest_path} has no sampling section")
        return known
    settings = section.get("sampling") or {}
    known.seed, known.reward = settings.get("seed"), settings.get("reward")
    known.policies = {entry["digest"] for entry in manifest.get("rounds", [])}
    try:
        known.prompts = _prompts(run, manifest)
    except LeretError as error:
        report.notes.append(f"prompts are not checked: {error}")
    try:
        known.gold = _gold(section, run)
    except LeretError as error:
        report.notes.append(f"rewards are not computed again: the questions cannot be read ({error})")
    return known


def _prompts(run: Run, manifest: Mapping[str, Any]) -> dict[str, str] | None:
    from leret.programs.prompts import Prompt

    bank = manifest.get("bank")
    if bank is None:
        return None
    return {name: Prompt.load(run.prompts / f"{name}.json").digest for name in bank["prompts"]}


def _gold(section: Mapping[str, Any], run: Run) -> dict[str, Task] | None:
    from pydantic import ValidationError

    from leret.sampling.rollouts.environment import Environment

    try:
        recipe = SamplingRecipe.model_validate(section)
    except ValidationError as error:
        raise RunError(f"{run.manifest_path} holds no whole recipe: {error.error_count()} keys are amiss") from error
    questions = Environment(recipe, run.cache).questions(recipe.data.split, None, check=False)
    return {question.id: question for question in questions if question.gold}


def _gather(found: Iterator[tuple[str, str]], faults: dict[str, Fault]) -> None:
    for what, example in found:
        fault = faults.setdefault(what, Fault(what))
        fault.count += 1
        if len(fault.examples) < _SHOWN:
            fault.examples.append(example)
