"""Columns of the user's files: rename them to leret's fields (`data.fields`), and guess the mapping."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from leret.config.data import FieldSettings
from leret.core.errors import DataError
from leret.datasets.records import Record

_PAGE = r"(doc|document|passage|page|article|corpus|context|evidence)"
_QUESTION_NAMES = {
    "id": r"((question|query|q|example)_?)?u?id",
    "question": r"((user|input)_)?(question|query)(_?(text|string|body))?|prompt|q",
    "relevant_doc_ids": rf"((relevant|gold|positive|pos|supporting|answer)_?)?{_PAGE}s?_?(ids?|nos?)"
    r"|(relevant|gold|positive)(_?(ids?|docs?|documents?|passages?))?|positives|pid|docno",
    "answer": r"((gold|reference|correct|short|best)_?)?(answer|response|reply|reference)s?(_?text)?",
}
_DOCUMENT_NAMES = {
    "doc_id": rf"({_PAGE}_?)?(u?id|no)|pid",
    "title": rf"({_PAGE}_?)?(title|name|heading|headline)",
    "text": rf"{_PAGE}?_?(text|body|contents?)|{_PAGE}|abstract",
}
"""Regular expressions for column names in snake case, by leret's field name. The first matching column is used."""
_ALIASES = {"question": ("query", "inputs"), "answer": ("answers",), "doc_id": ("_id", "id")}


class Renamed(dict[str, Any]):
    """A record under leret's names; ``columns`` are the names in the file."""

    columns: tuple[str, ...] = ()


def renamed(records: Iterable[Record], fields: FieldSettings, source: str, documents: bool) -> Iterator[Record]:
    """Yield records with leret's names for the mapped columns. DataError if a mapped column is in no record."""
    inputs = {} if documents else fields.inputs
    columns = {k: v for k, v in fields if isinstance(v, str) and (k in _DOCUMENT_NAMES) == documents}
    absent, present = {*columns.values(), *inputs.values()}, dict[str, None]()
    for record in records:
        if absent:
            present.update(dict.fromkeys(record.value))
            absent -= present.keys()
        value = Renamed({name: cell for name, cell in record.value.items() if name not in columns})
        value.update({name: record.value[column] for name, column in columns.items() if column in record.value})
        value.columns = tuple(record.value)
        if inputs:
            cells = {name: record.value.get(column) for name, column in inputs.items()}
            value["inputs"] = {name: "" if cell is None else cell for name, cell in cells.items()}
        yield replace(record, value=value)
    for name, column in (*columns.items(), *inputs.items()):
        if column in absent:
            near = ", ".join(map(repr, get_close_matches(column, present, len(present) or 1, 0.0)))
            raise DataError(f"{source}: data.fields.{name}: no column {column!r}; the columns are {near}")


def guess(example: Mapping[str, Any], documents: bool) -> dict[str, str]:
    """Return likely columns by leret's field name, for fields missing in the file. ``example`` is its first record."""
    columns: dict[str, str] = {}
    for name, pattern in (_DOCUMENT_NAMES if documents else _QUESTION_NAMES).items():
        fits = [column for column in example if re.fullmatch(pattern, _snake_case(column))]
        if fits and not {name, *_ALIASES.get(name, ())} & example.keys():
            value = example[fits[0]]
            is_list = name == "answer" and isinstance(value, str) and value.startswith("[")  # JSON in a CSV cell
            columns["answers" if is_list else name] = fits[0]
    return columns


def _snake_case(column: str) -> str:
    return re.sub(r"[^a-z]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column).lower()).strip("_")
