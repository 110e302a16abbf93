"""What a system did on a question, hop by hop, scored; its file, and the TREC files for other tools.

One table for every system: a row a question, sample and hop. The file is the only thing that later steps read, so
that a system that is already evaluated is as good as one that has just been.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from leret.core.errors import RunError
from leret.core.files import atomic_file, write_atomically
from leret.core.types import Task


@dataclass(frozen=True, slots=True)
class ScoredHop:
    """One hop of one run on one question, that is one search; ``hop`` counts from 1.

    A run that failed, that stopped at a completion that does not parse, or that never searched, ends in one row more,
    with its ``failure`` (and no measures), ``unparsed``, or neither.

    Attributes:
        query: what was searched for, several queries in one text; None in the row more.
        completion: of the LM call before it.
        doc_ids: all that was found by then, best first.
        lm_calls: since the row before; the last row of a run holds those after its search too.
        value: a picker's Q-value of the choice before it.
    """

    question_id: str
    type: str | None
    sample: int
    hop: int
    query: str | None
    completion: str | None
    doc_ids: tuple[str, ...]
    scores: tuple[float, ...]
    measures: Mapping[str, float]
    lm_calls: int = 0
    unparsed: bool = False
    failure: str | None = None
    value: float | None = None


_FIXED = {
    "question_id": pa.string(),
    "type": pa.string(),
    "sample": pa.int32(),
    "hop": pa.int32(),
    "query": pa.string(),
    "completion": pa.string(),
    "doc_ids": pa.list_(pa.string()),
    "scores": pa.list_(pa.float64()),
    "lm_calls": pa.int32(),
    "unparsed": pa.bool_(),
    "failure": pa.string(),
    "value": pa.float64(),
}


def write_rows(path: Path, rows: Iterable[ScoredHop], measures: Sequence[str]) -> None:
    """Write per_question.parquet: whole or not at all."""
    records = [{**row.measures, **{name: _plain(getattr(row, name)) for name in _FIXED}} for row in rows]
    schema = pa.schema([*_FIXED.items(), *((name, pa.float64()) for name in measures)])
    with atomic_file(path, "wb") as file:
        pq.write_table(pa.Table.from_pylist(records, schema), file)


def read_rows(path: Path) -> list[ScoredHop]:
    """Read what ``write_rows`` wrote, in its order."""
    try:
        records = pq.read_table(path).to_pylist()
        return [_row(record) for record in records]
    except (OSError, pa.ArrowException, KeyError) as error:
        why = f"column {error} is missing: it is of an older leret" if isinstance(error, KeyError) else error
        raise RunError(f"{path} cannot be read ({why}); delete {path.parent} and run `leret eval` again") from error


def _row(record: dict[str, Any]) -> ScoredHop:
    fixed = {name: record.pop(name) for name in _FIXED}
    fixed["doc_ids"], fixed["scores"] = tuple(fixed["doc_ids"]), tuple(fixed["scores"])
    return ScoredHop(**fixed, measures={name: value for name, value in record.items() if value is not None})


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def first_runs(rows: Iterable[ScoredHop]) -> dict[str, list[ScoredHop]]:
    """The rows of each question's first sample, in the order of the hops."""
    found: dict[str, list[ScoredHop]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.hop):
        if row.sample == 0:
            found[row.question_id].append(row)
    return found


@dataclass
class SystemResults:
    """The rows of one system, under a key that names policy, prompt, program, retriever, data and settings."""

    key: str
    rows: list[ScoredHop] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def lm_calls(self) -> int:
        """Completions that the rows stand for."""
        return sum(row.lm_calls for row in self.rows)

    def only(self, question_ids: Sequence[str], samples: int) -> SystemResults:
        """The rows of runs that are asked for and did not fail, in the order of the questions."""
        failed = {(row.question_id, row.sample) for row in self.rows if row.failure is not None}
        rows = [row for row in self.rows if row.sample < samples and (row.question_id, row.sample) not in failed]
        asked = set(question_ids)
        found = SystemResults(self.key, [row for row in rows if row.question_id in asked], self.seconds)
        found.sort(question_ids)
        return found

    def sort(self, question_ids: Sequence[str]) -> None:
        """By sample, question and hop."""
        place = {question_id: i for i, question_id in enumerate(question_ids)}
        self.rows.sort(key=lambda row: (row.sample, place[row.question_id], row.hop))

    def runs(self) -> set[tuple[str, int]]:
        """(question id, sample) of every run."""
        return {(row.question_id, row.sample) for row in self.rows}


def read_results(directory: Path, key: str) -> SystemResults:
    """What is there under this key; nothing, where it was evaluated otherwise or not at all."""
    try:
        note = json.loads((directory / "evaluated.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return SystemResults(key)
    if not isinstance(note, dict) or note.get("key") != key:
        return SystemResults(key)
    return SystemResults(key, read_rows(directory / "per_question.parquet"), float(note.get("seconds", 0.0)))


def write_results(directory: Path, kept: SystemResults, measures: Sequence[str]) -> None:
    """Write the rows, then the note that makes them count."""
    note = directory / "evaluated.json"
    note.unlink(missing_ok=True)
    write_rows(directory / "per_question.parquet", kept.rows, measures)
    write_atomically(note, json.dumps({"key": kept.key, "seconds": round(kept.seconds, 3)}) + "\n")


_UNSAFE = re.compile(r"[\s%\x00-\x20\x7f-\xa0\u200b\ufeff\ud800-\udfff]")


def escape(text: str) -> str:
    """An id for TREC files, whose fields stand apart by white space; `urllib.parse.unquote` undoes it.

    >>> escape("Ed Wood (film) 100%")
    'Ed%20Wood%20(film)%20100%25'
    """
    return _UNSAFE.sub(lambda m: "".join(f"%{b:02X}" for b in m[0].encode("utf-8", "surrogatepass")), text)


def write_run(path: Path, tag: str, rankings: Iterable[tuple[str, Sequence[str], Sequence[float]]]) -> None:
    """Write ``qid Q0 docid rank score tag`` lines.

    Readers of the format sort by score and break ties in ways of their own, some in single precision. So that all of
    them see the order that leret scored, a score that does not fall below the one before it is written one step of
    single precision lower.

    ``rankings`` are question id, document ids best first, and their scores; the tag is the system's name.
    """
    lines = [
        f"{escape(qid)} Q0 {escape(doc_id)} {rank} {score:.9g} {escape(tag)}\n"
        for qid, doc_ids, scores in rankings
        for rank, (doc_id, score) in enumerate(zip(doc_ids, strictly_decreasing(scores), strict=True), start=1)
    ]
    write_atomically(path, "".join(lines))


def write_qrels(path: Path, questions: Iterable[Task]) -> None:
    """Write ``qid 0 docid grade`` lines, one a gold document."""
    lines = [f"{escape(q.id)} 0 {escape(doc_id)} {grade}\n" for q in questions for doc_id, grade in q.grades.items()]
    write_atomically(path, "".join(lines))


def strictly_decreasing(scores: Sequence[float]) -> Iterator[float]:
    """The scores, each one step of single precision below the one before it where it was not below it already."""
    last = np.float32(np.inf)
    for score in scores:
        value = np.float32(score)
        if not value < last:
            value = np.nextafter(last, np.float32(-np.inf))
        last = value
        yield float(value)
