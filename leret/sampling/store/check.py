"""`leret store check`: check a store for damage and for rewards that do not match the stored rankings."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from pydantic import ValidationError

from leret.core.errors import LeretError
from leret.core.runs import Run
from leret.core.types import Outcome, Passage
from leret.rewards import ranking, scoring
from leret.rollouts.environment import Environment
from leret.sampling.store.merge import shard_stores
from leret.sampling.store.store import connect, errors_of, sample_of

_PATHS = {
    "a visit's chosen sample has another state, step or policy": (
        "SELECT v.question_id FROM visits v JOIN samples c ON c.id = v.chosen "
        "WHERE (c.state_id, c.step, c.policy_digest) IS NOT (v.state_id, v.step, v.policy_digest)"
    ),
    "a visit's parent is not the sample chosen at the previous step": (
        "SELECT v.question_id FROM visits v LEFT JOIN visits b ON (b.question_id, b.step, b.policy_digest) = "
        "(v.question_id, v.step - 1, v.policy_digest) WHERE v.step > 0 AND b.chosen IS NOT v.parent"
    ),
}
"""Consistency rules that the schema cannot enforce, each with a query for the rows that break it."""
_TOLERANCE = 1e-9
_SHOWN = 3


@dataclass
class StoreReport:
    """Counts of a store, notes on skipped checks, and each kind of fault with its first rows."""

    states: int = 0
    samples: int = 0
    visits: int = 0
    scored: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    rewards_recomputed: int = 0
    bytes: int = 0
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, what: str, rows: Iterable[object]) -> None:
        names = [str(row) for row in rows]
        if names:
            more = f" ({len(names):,} rows)" if len(names) > 1 else ""
            self.faults.append(f"{what}{more}: {', '.join(names[:_SHOWN])}")


def check_store(run: Run) -> StoreReport:
    """Check a run's store without writing to it; the store may be in use."""
    report = StoreReport(
        bytes=sum(file.stat().st_size for file in run.store.parent.glob(f"{run.store.name}*"))
    )
    with closing(connect(run.store, read_only=True)) as database, errors_of(run.store):
        database.execute("BEGIN")  # one snapshot, even if another process writes
        broken = [row[0] for row in database.execute("PRAGMA integrity_check(5)") if row[0] != "ok"]
        report.add("SQLite reports a damaged file; restore it from a backup", broken)
        lost = (
            f"{row['table']} row {row['rowid']}"
            for row in database.execute("PRAGMA foreign_key_check")
        )
        report.add("a row refers to a missing state or sample", lost)
        for what, sql in _PATHS.items():
            report.add(what, (row[0] for row in database.execute(sql)))
        for table in ("states", "samples", "visits"):
            setattr(report, table, database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
        kinds = database.execute(
            "SELECT failure_kind, count(*) FROM samples GROUP BY 1 ORDER BY 1"
        ).fetchall()
        report.failed = {kind: n for kind, n in kinds if kind is not None}
        report.scored = report.samples - sum(report.failed.values())
        if not broken:
            report.add("a reward does not match its ranking", _wrong_rewards(run, database, report))
    left = shard_stores(run)
    if left:
        report.notes.append(
            f"{len(left)} shard stores are not merged yet; run `leret sample` again"
        )
    return report


def _wrong_rewards(run: Run, database: sqlite3.Connection, report: StoreReport) -> Iterator[str]:
    """Yield ids of samples with a reward that does not match the ranking, if it needs only that."""
    try:
        environment = Environment.open(run)
        name = environment.recipe.sampling.reward
        # never runs a run's own code
        if not (isinstance(name, str) and hasattr(ranking, name.partition("@")[0])):
            report.notes.append(
                "rewards were not checked: sampling.reward needs more than a ranking"
            )
            return
        value = scoring(name)
        tasks = {task.id: task for task in environment.tasks(check=False)}
    except (LeretError, ValidationError) as error:
        report.notes.append(f"rewards were not checked: {error}")
        return
    for sample in map(
        sample_of, database.execute("SELECT * FROM samples WHERE reward IS NOT NULL")
    ):
        # Final rewards cannot be checked: their rankings are not stored.
        by_end = "final" in sample.components
        stored = sample.components.get("step") if by_end else sample.reward
        task = tasks.get(sample.task_id)
        if task is None or stored is None or not sample.is_sampled:
            continue
        ranking_of = zip(sample.doc_ids, sample.scores, strict=True)
        passages = tuple(Passage(doc_id, "", "", score) for doc_id, score in ranking_of)
        expected = value(Outcome(task, sample.completion or "", sample.outputs, passages))
        if expected is not None:
            report.rewards_recomputed += 1
            if abs(expected - stored) > _TOLERANCE:
                yield sample.id
