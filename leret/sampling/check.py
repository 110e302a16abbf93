"""`leret store check`: whether a run's store is what sampling writes, row by row; nothing is written.

Ids are digests of content, and rewards follow from rankings and gold documents, so that a store can be proven to be
sound without asking a model or an index again.
"""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leret.config import SamplingRecipe
from leret.errors import LeretError, RunError
from leret.runs import Run
from leret.sampling.check_rows import Known, sample_faults, state_faults, visit_faults
from leret.sampling.database import STORE_SCHEMA, run_error
from leret.sampling.merge import leftovers
from leret.sampling.records import SCHEMA_SQL

__all__ = ["Fault", "StoreReport", "check_store", "open_unwritten"]

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
    from leret.pipelines.prompts import Prompt

    bank = manifest.get("bank")
    if bank is None:
        return None
    return {name: Prompt.load(run.prompts / f"{name}.json").digest for name in bank["prompts"]}


def _gold(section: Mapping[str, Any], run: Run) -> dict[str, tuple[str, ...]] | None:
    from pydantic import ValidationError

    from leret.sampling.workbench import Workbench

    try:
        recipe = SamplingRecipe.model_validate(section)
    except ValidationError as error:
        raise RunError(f"{run.manifest_path} holds no whole recipe: {error.error_count()} keys are amiss") from error
    questions = Workbench(recipe, run.cache).questions(recipe.data.split, None, check=False)
    return {question.id: question.gold for question in questions}


def _gather(found: Iterator[tuple[str, str]], faults: dict[str, Fault]) -> None:
    for what, example in found:
        fault = faults.setdefault(what, Fault(what))
        fault.count += 1
        if len(fault.examples) < _SHOWN:
            fault.examples.append(example)
