"""A format: how one record of a file becomes a question, and how it becomes documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leret.core.types import Document, Task
from leret.datasets.records import BadRecord


@dataclass(frozen=True, slots=True)
class Format:
    """Reads the records of one kind of file. Both functions raise `BadRecord`.

    Attributes:
        name: as messages call it.
        question: a record to a question.
        documents: a record to the documents in it: one in a corpus, many in the contexts of a question file.
        shared: the same document may come again, in another question's context; the first one is kept.
    """

    name: str
    question: Callable[[Mapping[str, Any]], Task]
    documents: Callable[[Mapping[str, Any]], Iterable[Document]]
    shared: bool = False


def sentences(value: Any, title: str) -> str:
    """Text of a document that is kept as a list of sentences, or as one string.

    Raises:
        BadRecord: it is neither.
    """
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, Sequence) or not all(isinstance(sentence, str) for sentence in value):
        raise BadRecord("wrong type", f"the text of {title!r} is {str(value)[:60]}; it should be a list of sentences")
    return " ".join(sentence.strip() for sentence in value)


_Value = Mapping[str, Any]


def text(record: _Value, *names: str) -> str:
    """A string that is not blank, under the first of the names that is there."""
    name, value = _find(record, names)
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    if not value.strip():
        raise BadRecord("empty field", f"field {name!r} is empty")
    return value


def optional_text(record: _Value, *names: str) -> str | None:
    """A string, or None where no name is there or the value is null."""
    for name in names:
        value = record.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise _wrong(name, value, "a string")
            return value
    return None


def optional_number(record: _Value, name: str) -> int | None:
    """A whole number, or None where it is absent or null."""
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, value, "a whole number")
    return value


def text_list(record: _Value, name: str) -> tuple[str, ...]:
    """Strings that are not blank, no string twice, at least one."""
    _, value = _find(record, (name,))
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong(name, value, "a list of strings")
    for item in value:
        if not isinstance(item, str) or not item.strip():
            raise _wrong(name, item, "strings that are not empty, item by item")
    if not value:
        raise BadRecord("no gold", f"field {name!r} is empty: a question without gold documents cannot be scored")
    return tuple(dict.fromkeys(value))


def grades(record: _Value, name: str, gold: Sequence[str]) -> dict[str, int]:
    """Whole numbers by document, above 0 for gold alone; nothing where the field is absent, or all of them are 1."""
    value = record.get(name) or {}
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "whole numbers by document id")
    for doc_id, grade in value.items():
        if not isinstance(grade, int) or isinstance(grade, bool) or (grade > 0) != (doc_id in gold):
            raise _wrong(f"{name}.{doc_id}", grade, "a whole number, above 0 for relevant documents alone")
    return dict(value) if set(value.values()) - {1} else {}


def rows(record: _Value, name: str, first: str, second: str) -> list[tuple[Any, Any]]:
    """Pairs under a name: ``[[a, b], ...]``, or as a hub's tables hold them.

    Those are ``{first: [a, ...], second: [b, ...]}`` and ``[{"key": a, "value": b}, ...]``.
    """
    _, value = _find(record, (name,))
    if isinstance(value, Mapping):
        left, right = value.get(first), value.get(second)
        if isinstance(left, Sequence) and isinstance(right, Sequence) and len(left) == len(right):
            return list(zip(left, right, strict=True))
        raise _wrong(name, value, f"lists of one length under {first!r} and {second!r}")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong(name, value, f"a list of [{first}, {second}]")
    pairs = [tuple(item.values()) if isinstance(item, Mapping) else item for item in value]
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise _wrong(name, pair, f"[{first}, {second}]")
    return [(pair[0], pair[1]) for pair in pairs]


def _find(record: _Value, names: Sequence[str]) -> tuple[str, Any]:
    for name in names:
        if name in record:
            return name, record[name]
    wanted = " or ".join(repr(name) for name in names)
    there = ", ".join(map(repr, record)) or "none"
    raise BadRecord("missing field", f"field {wanted} is missing; the fields are {there}")


def _wrong(name: str, value: Any, wanted: str) -> BadRecord:
    found = f"{str(value)[:60]!r} ({type(value).__name__})"
    return BadRecord("wrong type", f"field {name!r} is {found}; it should be {wanted}")
