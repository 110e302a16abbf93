"""Columns of the user's files: rename them to leret's fields (`data.fields`), and guess the mapping."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain
from operator import itemgetter
from statistics import mean
from typing import Any

from leret.config.data import FieldSettings
from leret.core.errors import DataError
from leret.datasets.records import Record

_PAGE = r"(doc|document|passage|page|article|corpus|context|evidence)"
_ID = r"(u?id|no|nr|num|number|key|code)"
_QUESTION_NAMES = {
    "answer": r"([a-z]+_)?(answer|response|reply|reference)s?(_?text)?",
    "relevant_doc_ids": rf"((relevant|gold|positive|pos|supporting|answer)_?)?{_PAGE}s?_?(ids?|nos?)"
    r"|(relevant|gold|positive)(_?(ids?|docs?|documents?|passages?))?|positives|pid|docno|evidence|sources?",
    "question": r"([a-z]+_)?(question|query)(_?(text|string|body))?|prompt|q",
    "id": rf"((question|query|q|example)_?)?u?id|([a-z]+_)?{_ID}",
}
_DOCUMENT_NAMES = {
    "title": rf"({_PAGE}_?)?(title|name|heading|headline)",
    "text": rf"([a-z]+_)?(text|body|contents?)|{_PAGE}_?(text|body|contents?)?|abstract",
    "doc_id": rf"({_PAGE}_?)?(u?id|no)|([a-z]+_)?{_ID}|pid|ref(erence)?(_{_ID})?",
}
"""Regular expressions for column names in snake case, by leret's field name. The first matching column is used."""
_ALIASES = {"question": {"query", "inputs"}, "answer": {"answers"}, "doc_id": {"_id", "id"}}
_MISSING = {
    "question": "field 'question' or 'query' is missing",
    "relevant_doc_ids": "no 'relevant_doc_ids', 'answer' or 'answers' to score against",
    "doc_id": "field 'doc_id', '_id' or 'id' is missing",
    "text": "field 'text' is missing",
}
_PARTS = (
    re.compile(r"[^|;,\[\]'\"]+"),
    re.compile(r"[^|;,\s\[\]'\"]+"),
)  # of a cell with several ids
_KNOWN = (
    0.2  # share of a column's ids that the corpus's first rows must have, for a guess by content
)

Table = tuple[str, bool, Sequence[Mapping[str, Any]]]
"""The name of a file, whether it is a corpus, and its first rows."""


class Renamed(dict[str, Any]):
    """A record under leret's names; ``columns`` are the names in the file."""

    columns: tuple[str, ...] = ()


def renamed(
    records: Iterable[Record], fields: FieldSettings, source: str, documents: bool
) -> Iterator[Record]:
    """Yield records with leret's names for the mapped columns. DataError if a mapped column is in no record."""
    inputs = {} if documents else fields.inputs
    columns = {
        k: v for k, v in fields if isinstance(v, str) and (k in _DOCUMENT_NAMES) == documents
    }
    absent, present = {*columns.values(), *inputs.values()}, dict[str, None]()
    for record in records:
        if absent:
            present.update(dict.fromkeys(record.value))
            absent -= present.keys()
        value = Renamed({name: cell for name, cell in record.value.items() if name not in columns})
        value.update(
            {
                name: record.value[column]
                for name, column in columns.items()
                if column in record.value
            }
        )
        value.columns = tuple(record.value)
        if inputs:
            cells = {name: record.value.get(column) for name, column in inputs.items()}
            value["inputs"] = {name: "" if cell is None else cell for name, cell in cells.items()}
        yield replace(record, value=value)
    for name, column in (*columns.items(), *inputs.items()):
        if column in absent:
            near = ", ".join(map(repr, get_close_matches(column, present, len(present) or 1, 0.0)))
            raise DataError(
                f"{source}: data.fields.{name}: no column {column!r}; the columns are {near}"
            )


def guess(tables: Sequence[Table], flags: Mapping[str, Any]) -> dict[str, str]:
    """Return columns by leret's field name: those of ``flags``, and likely ones for fields that the files lack.

    Args:
        tables: the corpus, if there is one, and the questions.
        flags: columns by field name; None for a field that must not be guessed.

    Raises:
        DataError: fields without a column, in all files, with flags of `leret init` for the most likely columns.
    """
    columns = {field: column for field, column in flags.items() if isinstance(column, str)}
    faults: list[str] = []
    ids: set[str] = set()  # cells of the corpus
    for source, documents, rows in filter(itemgetter(2), tables):  # an empty file has other faults
        cells: dict[str, list[str]] = {}
        for row in rows:
            for name, value in row.items():
                cells.setdefault(name, []).append(str(value))
        missing = _guess_by_name(cells, documents, columns, flags)
        if not documents and "relevant_doc_ids" not in {*columns, *cells, *flags}:
            known = {*_QUESTION_NAMES, *chain(*_ALIASES.values())}
            names = {
                cell for cell in ids if not cell.isdigit()
            }  # a number may be a count, a year or a row
            likely = _likely("relevant_doc_ids", cells, {*columns.values(), *known}, names)
            if likely in cells and _known_share(cells[likely], names) >= _KNOWN:
                columns["relevant_doc_ids"] = likely
                missing.pop("relevant_doc_ids", None)
        if missing:
            present = ", ".join(map(repr, cells))
            kind = "columns" if flags else "fields"
            faults.append(f"{source}: {'; '.join(missing.values())}; the {kind} are {present}")
        for field in missing:
            columns.pop(field, None)
            if field in _MISSING:
                columns[field] = _likely(field, cells, columns.values(), ids)
        ids.update(*cells.values())
    if faults:
        ready = " ".join(
            f"--field {field}={shlex.quote(column)}" for field, column in columns.items()
        )
        raise DataError("\n".join([*faults, "name the columns:", f"  {ready}"]))
    return columns


def _guess_by_name(
    cells: Mapping[str, list[str]],
    documents: bool,
    columns: dict[str, str],
    flags: Mapping[str, Any],
) -> dict[str, str]:
    """Add the guesses for one file to ``columns``, and return a message for each field without a column."""
    missing: dict[str, str] = {}
    for field, column in columns.items():
        if (field in _DOCUMENT_NAMES) == documents and column not in cells:
            missing[field] = f"data.fields.{field}: no column {column!r}"
    for field, pattern in (_DOCUMENT_NAMES if documents else _QUESTION_NAMES).items():
        if ({field} | _ALIASES.get(field, set())) & (cells.keys() | flags.keys()):
            continue
        likely = _by_name(field, pattern, cells, columns.values())
        is_answered = field == "relevant_doc_ids" and {"answer", "answers"} & {*cells, *columns}
        if likely is not None:
            is_list = field == "answer" and cells[likely][0].startswith("[")  # JSON in a CSV cell
            columns["answers" if is_list else field] = likely
        elif field in _MISSING and not is_answered:
            missing[field] = _MISSING[field]
    return missing


def _by_name(
    field: str, pattern: str, cells: Mapping[str, list[str]], used: Collection[str]
) -> str | None:
    """Return the first unused column with a name like the field; an id must be unique."""
    for column, values in cells.items():
        is_repeated = field in ("id", "doc_id") and len(set(values)) < len(values)
        if column not in used and not is_repeated and re.fullmatch(pattern, _snake_case(column)):
            return column
    return None


def _likely(
    field: str, cells: Mapping[str, list[str]], used: Collection[str], ids: set[str]
) -> str:
    """Return the unused column that is most like a field: ids of the corpus, distinct ids, or long texts."""

    def rank(column: str) -> float:
        if field == "relevant_doc_ids":
            return _known_share(cells[column], ids)
        return len(set(cells[column])) if field == "doc_id" else sum(map(len, cells[column]))

    return max((column for column in cells if column not in used), key=rank, default="COLUMN")


def _known_share(cells: Sequence[str], ids: Container[str]) -> float:
    """Return the mean share of ids of the corpus in a column, by the split of a cell that finds more of them."""

    def share(cell: str, pattern: re.Pattern[str]) -> float:
        parts = pattern.findall(cell)
        return sum(part.strip() in ids for part in parts) / max(1, len(parts))

    shares = []
    for cell in cells:
        shares.append(max(share(cell, pattern) for pattern in _PARTS))
    return mean(shares)


def _snake_case(column: str) -> str:
    return re.sub(r"[^a-z]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column).lower()).strip("_")
