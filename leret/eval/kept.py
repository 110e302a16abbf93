"""What is already evaluated, so that it is not asked for again: R/eval/SYSTEM/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leret.eval.traces import Row, read_rows, write_rows
from leret.runs import write_atomically

__all__ = ["Kept", "read_kept", "write_kept"]


@dataclass
class Kept:
    """The rows of one system.

    Attributes:
        key: names policy, prompt, program, retriever, data and settings; rows under another key are not looked at.
        seconds: wall clock of all sessions.
    """

    key: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def lm_calls(self) -> int:
        """Completions that the rows stand for."""
        return sum(row.completion is not None for row in self.rows)

    def only(self, question_ids: Sequence[str], samples: int) -> Kept:
        """The rows of runs that are asked for and did not fail, in the order of the questions."""
        failed = {(row.question_id, row.sample) for row in self.rows if row.failure is not None}
        place = {question_id: i for i, question_id in enumerate(question_ids)}
        rows = [
            row
            for row in self.rows
            if row.question_id in place and row.sample < samples and (row.question_id, row.sample) not in failed
        ]
        rows.sort(key=lambda row: (row.sample, place[row.question_id], row.hop))
        return Kept(self.key, rows, self.seconds)

    def runs(self) -> set[tuple[str, int]]:
        """(question id, sample) of every run."""
        return {(row.question_id, row.sample) for row in self.rows}


def read_kept(directory: Path, key: str) -> Kept:
    """What is there under this key; nothing, where it was evaluated otherwise or not at all.

    Raises:
        RunError: the rows are damaged.
    """
    try:
        note = json.loads((directory / "evaluated.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Kept(key)
    if not isinstance(note, dict) or note.get("key") != key:
        return Kept(key)
    return Kept(key, read_rows(directory / "per_question.parquet"), float(note.get("seconds", 0.0)))


def write_kept(directory: Path, kept: Kept, measures: Sequence[str]) -> None:
    """Write the rows, then the note that makes them count."""
    note = directory / "evaluated.json"
    note.unlink(missing_ok=True)
    write_rows(directory / "per_question.parquet", kept.rows, measures)
    write_atomically(note, json.dumps({"key": kept.key, "seconds": round(kept.seconds, 3)}) + "\n")
