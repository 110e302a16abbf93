"""What a system did on a question, hop by hop, scored; and its file.

One table for every system: a row a question, sample and hop. The file is the only thing that later steps read, so
that a system that is already evaluated is as good as one that has just been.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from leret.errors import RunError
from leret.types import Ranking

__all__ = ["Hop", "Row", "Trace", "read_rows", "write_rows"]


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a program.

    Attributes:
        query: the text that was searched for, as far as the outputs show it; None where none could be parsed.
        completion: what the LM wrote; None for a system without an LM.
        ranking: everything found by the end of this hop, best first.
    """

    query: str | None
    completion: str | None
    ranking: Ranking


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of one system on one question.

    Attributes:
        sample: which of several runs.
        failure: what kept the run from ending (an outage, a crash of the program): not the system's result.
        unparsed: the last completion was not in the adapter's format, and ended the run there.
    """

    question_id: str
    hops: tuple[Hop, ...]
    sample: int = 0
    failure: str | None = None
    unparsed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One hop of one run on one question; ``hop`` counts from 1.

    ``failure`` is set on the last row of a run that failed (which then has no measures); ``unparsed`` on the last row
    of one that stopped at a completion that does not parse.
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
    unparsed: bool = False
    failure: str | None = None


_FIXED = {
    "question_id": pa.string(),
    "type": pa.string(),
    "sample": pa.int32(),
    "hop": pa.int32(),
    "query": pa.string(),
    "completion": pa.string(),
    "doc_ids": pa.list_(pa.string()),
    "scores": pa.list_(pa.float64()),
    "unparsed": pa.bool_(),
    "failure": pa.string(),
}


def write_rows(path: Path, rows: Iterable[Row], measures: Sequence[str]) -> None:
    """Write per_question.parquet: whole or not at all."""
    kept = list(rows)
    columns: dict[str, list[Any]] = {name: [_plain(getattr(row, name)) for row in kept] for name in _FIXED}
    for name in measures:
        columns[name] = [_number(row.measures.get(name)) for row in kept]
    schema = pa.schema([*_FIXED.items(), *((name, pa.float64()) for name in measures)])
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    try:
        pq.write_table(pa.table(columns, schema=schema), unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_rows(path: Path) -> list[Row]:
    """Read what ``write_rows`` wrote, in its order.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        records = pq.read_table(path).to_pylist()
        return [_row(record) for record in records]
    except (OSError, pa.ArrowException, KeyError) as error:
        raise RunError(f"{path} cannot be read ({error}); delete {path.parent} and run `leret eval` again") from error


def _row(record: dict[str, Any]) -> Row:
    fixed = {name: record.pop(name) for name in _FIXED}
    fixed["doc_ids"], fixed["scores"] = tuple(fixed["doc_ids"]), tuple(fixed["scores"])
    return Row(**fixed, measures={name: value for name, value in record.items() if value is not None})


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
