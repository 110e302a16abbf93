"""Base of the file formats: turn records into tasks and documents, and check the records' fields.

Records may also come from the Hugging Face Hub: ``hf:NAME``, ``hf:NAME:CONFIG`` or
``hf:NAME:CONFIG@SPLIT``, for example ``hf:hotpotqa/hotpot_qa:distractor@validation``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leret.config.data import FileSettings
from leret.core.errors import DataError, import_optional
from leret.core.types import Document, Task
from leret.datasets.columns import MappedFields, rename_columns
from leret.datasets.records import BadRecord, LeftOut, Problems, Reader, Record, records
from leret.datasets.splits import SPLITS, SplitName

Fields = Mapping[str, Any]
HUB = "hf:"
_WHOLE_NUMBER = re.compile(r"\s*-?[0-9]{1,18}\s*")
_UNANSWERABLE = {"is_impossible": ("true", "1"), "answerable": ("false", "0")}
"""Values of the marks of unanswerable questions (SQuAD 2.0, MuSiQue), as text in lower case."""


@dataclass
class FileReader(Reader):
    """Reads JSON records from a file or the Hugging Face Hub.

    ``task`` and ``in_record`` may raise `BadRecord`.
    """

    task: Callable[[Fields], Task]
    # one document for a corpus record, several for a question
    in_record: Callable[[Fields], Iterable[Document]]
    marks: tuple[str, ...]  # a file is of this kind if its first record has one of these fields
    brings_documents: bool = False
    repeats_documents: bool = False
    alternative: FileReader | None = None  # reads files of this kind that are in leret's own format

    def fits(self, record: Fields) -> bool:
        return any(name in record for name in self.marks)

    def tasks(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        for record, reader in self._records(data, problems, is_corpus=False):
            with problems.at(record.place):
                _refuse_unanswerable(record.value)
                task = reader.task(record.value)
                if record.split and not task.split:
                    task = replace(task, split=record.split)
                yield record, task

    def documents(
        self, data: FileSettings, problems: Problems
    ) -> Iterator[tuple[Record, Document]]:
        for record, reader in self._records(data, problems, is_corpus=True):
            with problems.at(record.place):
                for document in reader.in_record(record.value):
                    yield record, document

    def _records(
        self, data: FileSettings, problems: Problems, is_corpus: bool
    ) -> Iterator[tuple[Record, FileReader]]:
        source = data.questions
        if is_corpus and data.corpus:
            source = data.corpus
        rows = self.rows(source, problems)
        if data.fields:
            rows = rename_columns(rows, data.fields, source, is_corpus)
        reader: FileReader | None = None  # of the whole file, by its first record
        for record in rows:
            if reader is None:
                reader = self
                if self.alternative is not None and self.alternative.fits(record.value):
                    reader = self.alternative
            yield record, reader

    def rows(self, source: str, problems: Problems) -> Iterator[Record]:
        """Yield the records of a file or a data set on the Hub, with the source's column names."""
        if source.startswith(HUB):
            return _hub_records(source)
        return records(Path(source), problems)


def _hub_records(source: str) -> Iterator[Record]:
    """Stream the rows of a data set on the Hub, from the named split or from all splits."""
    import httpx

    datasets = import_optional("datasets", "datasets", "train")
    name, _, split = source.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    try:
        parts = datasets.load_dataset(name, config or None, streaming=True)
        if split and split not in parts:
            available = ", ".join(map(str, parts))
            raise DataError(f"{source}: no split {split!r}; available: {available}")
        number = 0
        for part in [split] if split else list(parts):
            split_name = SPLITS.get(str(part))
            for row in parts[part]:
                number += 1
                place = f"{source} {part}: row {number}"
                yield Record(place, number, dict(row), split_name)
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        message = str(error).strip() or type(error).__name__
        cause = message.splitlines()[0]
        advice = "check the name and the network, or download the files and set their paths"
        raise DataError(
            f"{source}: cannot be loaded from the Hugging Face Hub ({cause}); {advice}"
        ) from error


def sentences(value: Any, title: str) -> str:
    """Return the text of a document, given as a list of sentences or as one string."""
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, Sequence) or not all(isinstance(sentence, str) for sentence in value):
        fault = f"the text of {title!r} is {str(value)[:60]}"
        raise BadRecord("wrong type", f"{fault}; it should be a list of sentences")
    return " ".join(map(str.strip, value))


def text(record: Fields, *names: str) -> str:
    """Return the first of the named fields that exists.

    It must be a non-blank string or a whole number (an id).
    """
    name, value = _find(record, names)
    if _is_blank(value):
        raise BadRecord("empty field", f"field {name!r} is empty")
    if not isinstance(value, str) and type(value) is not int:
        raise wrong(name, value, "a string")
    return str(value)


def optional_text(record: Fields, name: str) -> str | None:
    """Return a string field, or None if the field is absent, null or blank."""
    value = record.get(name)
    if _is_blank(value):
        return None
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    return value


def optional_number(record: Fields, name: str) -> int | None:
    """Return a whole-number field (text in a CSV file); None if it is absent, null or blank."""
    value: Any = record.get(name)
    if _is_blank(value):
        return None
    if type(value) is int:
        return value
    if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
        return int(value)
    raise wrong(name, value, "a whole number")


def _is_blank(value: Any) -> bool:
    """Return whether a field is null, or a text without words."""
    if isinstance(value, str):
        return not value.strip()
    return value is None


def split(record: Fields) -> SplitName | None:
    """Return the field ``split`` under leret's name; None if it is absent, null or blank."""
    name = optional_text(record, "split")
    if name is None:
        return None
    if name not in SPLITS:
        fault = f"field 'split' is {name!r}; it should be train, dev or test"
        raise BadRecord("unknown split", fault)
    return SPLITS[name]


def text_list(record: Fields, name: str, *, may_be_blank: bool = False) -> tuple[str, ...]:
    """Return a list of non-blank strings without duplicates.

    It is empty if the field is absent, null or blank.

    The field may also be a single string or whole number, or (in a CSV file) a list written as
    JSON. With ``may_be_blank``, blank and null items are left out; otherwise they are a fault.
    """
    value = record.get(name)
    if _is_blank(value):
        return ()
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (RecursionError, ValueError) as error:
            raise wrong(name, value, 'one value, or a list in JSON, as in ["d7", "d2"]') from error
    items = [value]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = [*value]
    texts: dict[str, None] = {}
    for item in items:
        text = str(item) if type(item) is int else item
        is_blank = _is_blank(text)
        if is_blank and may_be_blank:
            continue
        if is_blank or not isinstance(text, str):
            raise wrong(name, item, "a list of non-empty strings")
        texts[text] = None
    return tuple(texts)


def answers(record: Fields, *names: str) -> tuple[str, ...]:
    """Return the reference answers in the fields, without duplicates.

    A blank or null answer is no reference.
    """
    texts: list[str] = []
    for name in names:
        value = record.get(name)
        # a text in `answer` is never a list, even if it begins with a bracket
        if name != "answer" or not isinstance(value, str):
            texts += text_list(record, name, may_be_blank=True)
        elif value.strip():
            texts.append(value)
    return tuple(dict.fromkeys(texts))


def _refuse_unanswerable(record: Fields) -> None:
    for name, values in _UNANSWERABLE.items():
        mark = str(record.get(name)).strip().lower()
        if mark in values:
            raise LeftOut("marked as unanswerable")


def rows(record: Fields, name: str, first: str, second: str) -> list[tuple[Any, Any]]:
    """Return the (a, b) pairs of a field.

    The field is ``[[a, b], ...]``, ``{first: [a, ...], second: [b, ...]}`` or
    ``[{"key": a, "value": b}, ...]``.
    """
    _, value = _find(record, (name,))
    if isinstance(value, Mapping):
        left = value.get(first)
        right = value.get(second)
        if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
            return list(zip(left, right, strict=True))
        raise wrong(name, value, f"two lists of equal length, {first!r} and {second!r}")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise wrong(name, value, f"a list of [{first}, {second}]")
    pairs = []
    for item in value:
        pair = tuple(item.values()) if isinstance(item, Mapping) else item
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise wrong(name, pair, f"[{first}, {second}]")
        pairs.append((pair[0], pair[1]))
    return pairs


def wrong(name: str, value: Any, expected: str) -> BadRecord:
    """Return the error for a field of the wrong type."""
    fault = f"field {name!r} is {str(value)[:60]!r} ({type(value).__name__})"
    return BadRecord("wrong type", f"{fault}; it should be {expected}")


def _find(record: Fields, names: Sequence[str]) -> tuple[str, Any]:
    for name in names:
        if name in record:
            return name, record[name]
    expected = " or ".join(map(repr, names))
    fault = f"field {expected} is missing; the fields are {names_in(record)}"
    raise BadRecord("missing field", fault)


def names_in(record: Fields) -> str:
    """Return the names of a record's fields for a message: the user's names of mapped columns."""
    names = record.columns if isinstance(record, MappedFields) else record
    return ", ".join(map(repr, names)) or "none"
