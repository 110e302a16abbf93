"""Columns of the user's files: rename them to leret's fields (`data.fields`), and guess them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain
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
"""Regular expressions for column names in snake case, by leret's field name.

The first matching column is used.
"""
_ALIASES = {"question": {"query", "inputs"}, "answer": {"answers"}, "doc_id": {"_id", "id"}}
_MISSING = {
    "question": "field 'question' or 'query' is missing",
    "relevant_doc_ids": "no 'relevant_doc_ids', 'answer' or 'answers' to score against",
    "doc_id": "field 'doc_id', '_id' or 'id' is missing",
    "text": "field 'text' is missing",
}
# parts of a cell with several ids
_PARTS = (re.compile(r"[^|;,\[\]'\"]+"), re.compile(r"[^|;,\s\[\]'\"]+"))
# share of a column's ids that the corpus's first rows must have, for a guess by content
_LEAST_SHARE = 0.2

Table = tuple[str, bool, Sequence[Mapping[str, Any]]]
"""The name of a file, whether it is a corpus, and its first rows."""


class MappedFields(dict[str, Any]):
    """A record under leret's names; ``columns`` are the names in the file."""

    columns: tuple[str, ...] = ()


def rename_columns(
    records: Iterable[Record], fields: FieldSettings, source: str, is_corpus: bool
) -> Iterator[Record]:
    """Yield records with leret's names for the mapped columns.

    DataError if a mapped column is in no record.
    """
    inputs = {} if is_corpus else fields.inputs
    columns: dict[str, str] = {}
    for name, column in fields:
        if isinstance(column, str) and (name in _DOCUMENT_NAMES) == is_corpus:
            columns[name] = column
    absent = {*columns.values(), *inputs.values()}
    present: dict[str, None] = {}
    for record in records:
        row = record.value
        if absent:
            present.update(dict.fromkeys(row))
            absent -= present.keys()
        value = MappedFields({name: cell for name, cell in row.items() if name not in columns})
        for name, column in columns.items():
            if column in row:
                value[name] = row[column]
        value.columns = tuple(row)
        if inputs:
            value["inputs"] = {name: _cell(row, column) for name, column in inputs.items()}
        yield replace(record, value=value)
    for name, column in (*columns.items(), *inputs.items()):
        if column in absent:
            near = get_close_matches(column, present, len(present) or 1, 0.0)
            names = ", ".join(map(repr, near))
            raise DataError(
                f"{source}: data.fields.{name}: no column {column!r}; the columns are {names}"
            )


def _cell(row: Mapping[str, Any], column: str) -> Any:
    value = row.get(column)
    return "" if value is None else value


def guess(tables: Sequence[Table], flags: Mapping[str, Any]) -> dict[str, str]:
    """Return columns by leret's field name: those of ``flags``, and likely ones for missing fields.

    Args:
        tables: the corpus, if there is one, and the questions.
        flags: columns by field name; None for a field that must not be guessed.

    Raises:
        DataError: fields without a column, in all files, with flags of `leret init` for the most
            likely columns.
    """
    columns = {field: column for field, column in flags.items() if isinstance(column, str)}
    faults: list[str] = []
    ids: set[str] = set()  # of documents
    for source, is_corpus, rows in tables:
        if not rows:  # an empty file has other faults
            continue
        cells: dict[str, list[str]] = {}
        for row in rows:
            for name, value in row.items():
                cells.setdefault(name, []).append(str(value))
        missing = _guess_by_name(cells, is_corpus, columns, flags)
        if not is_corpus and "relevant_doc_ids" not in {*columns, *cells, *flags}:
            used = {*columns.values(), *_QUESTION_NAMES, *chain(*_ALIASES.values())}
            gold = _column_of_ids(cells, used, ids)
            if gold is not None:
                columns["relevant_doc_ids"] = gold
                missing.pop("relevant_doc_ids", None)
        if missing:
            fault = "; ".join(missing.values())
            kind = "columns" if flags else "fields"
            present = ", ".join(map(repr, cells))
            faults.append(f"{source}: {fault}; the {kind} are {present}")
        for field in missing:
            columns.pop(field, None)
            if field in _MISSING:
                columns[field] = _likely(field, cells, columns.values(), ids)
        if is_corpus:
            for name in (columns.get("doc_id", "doc_id"), *_ALIASES["doc_id"]):
                ids.update(cells.get(name, ()))
    if faults:
        options = [f"--field {field}={shlex.quote(column)}" for field, column in columns.items()]
        advice = " ".join(options)
        raise DataError("\n".join([*faults, "name the columns:", f"  {advice}"]))
    return columns


def _guess_by_name(
    cells: Mapping[str, list[str]],
    is_corpus: bool,
    columns: dict[str, str],
    flags: Mapping[str, Any],
) -> dict[str, str]:
    """Add the guesses for a file to ``columns``; return a message for each missing column."""
    missing: dict[str, str] = {}
    for field, column in columns.items():
        if (field in _DOCUMENT_NAMES) == is_corpus and column not in cells:
            missing[field] = f"data.fields.{field}: no column {column!r}"
    patterns = _DOCUMENT_NAMES if is_corpus else _QUESTION_NAMES
    for field, pattern in patterns.items():
        names = {field} | _ALIASES.get(field, set())
        if names & (cells.keys() | flags.keys()):
            continue
        likely = _by_name(field, pattern, cells, columns.values())
        if likely is not None:
            is_list = field == "answer" and cells[likely][0].startswith("[")  # JSON in a CSV cell
            name = "answers" if is_list else field
            columns[name] = likely
            continue
        has_answers = not {"answer", "answers"}.isdisjoint({*cells, *columns})
        if field == "relevant_doc_ids" and has_answers:
            continue
        if field in _MISSING:
            missing[field] = _MISSING[field]
    return missing


def _by_name(
    field: str, pattern: str, cells: Mapping[str, list[str]], used: Collection[str]
) -> str | None:
    """Return the first unused column with a name like the field; an id must be unique."""
    for column, values in cells.items():
        if column in used or not re.fullmatch(pattern, _snake_case(column)):
            continue
        is_unique = len(set(values)) == len(values)
        if is_unique or field not in ("id", "doc_id"):
            return column
    return None


def _column_of_ids(
    cells: Mapping[str, list[str]], used: Collection[str], ids: set[str]
) -> str | None:
    """Return the unused column with the largest share of the corpus's ids, if it is large enough."""
    # a number may be a count, a year or a row
    names = {cell for cell in ids if not cell.isdigit()}
    likely = _likely("relevant_doc_ids", cells, used, names)
    if likely in cells and _share_of_ids(cells[likely], names) >= _LEAST_SHARE:
        return likely
    return None


def _likely(
    field: str, cells: Mapping[str, list[str]], used: Collection[str], ids: set[str]
) -> str:
    """Return the unused column that is most like a field: by ids of the corpus, or by its texts."""

    def rank(column: str) -> float:
        values = cells[column]
        if field == "relevant_doc_ids":
            return _share_of_ids(values, ids)
        if field == "doc_id":
            return len(set(values))
        return sum(map(len, values))

    unused = [column for column in cells if column not in used]
    return max(unused, key=rank, default="COLUMN")


def _share_of_ids(cells: Sequence[str], ids: Container[str]) -> float:
    """Return the mean share of ids of the corpus in a column, by the better split of each cell."""

    def share(cell: str, pattern: re.Pattern[str]) -> float:
        parts = pattern.findall(cell)
        n_ids = sum(part.strip() in ids for part in parts)
        return n_ids / max(1, len(parts))

    shares = []
    for cell in cells:
        best = max(share(cell, pattern) for pattern in _PARTS)
        shares.append(best)
    return mean(shares)


def _snake_case(column: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column)
    snake_case = re.sub(r"[^a-z]+", "_", words.lower())
    return snake_case.strip("_")
