"""Base of the file formats: turn records into tasks and documents, and check the records' fields.

Records may also come from the Hugging Face Hub: ``hf:NAME``, ``hf:NAME:CONFIG`` or ``hf:NAME:CONFIG@SPLIT``, for
example ``hf:hotpotqa/hotpot_qa:distractor@validation``.
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
from leret.datasets.columns import Renamed, renamed
from leret.datasets.records import BadRecord, LeftOut, Problems, Reader, Record, records
from leret.datasets.splits import SPLITS, SplitName

Fields = Mapping[str, Any]
HUB = "hf:"
_WHOLE_NUMBER = re.compile(r"\s*-?[0-9]{1,18}\s*")
_UNANSWERABLE = {"is_impossible": ("true", "1"), "answerable": ("false", "0")}
"""Values of the marks of unanswerable questions (SQuAD 2.0, MuSiQue), as text in lower case."""


@dataclass
class FileReader(Reader):
    """Reads JSON records from a file or the Hugging Face Hub. ``task`` and ``in_record`` may raise `BadRecord`."""

    task: Callable[[Fields], Task]
    in_record: Callable[
        [Fields], Iterable[Document]
    ]  # one for a corpus record, several for a question
    marks: tuple[str, ...]  # a file is of this kind if its first record has one of these fields
    brings_documents: bool = False
    repeats_documents: bool = False
    alternative: FileReader | None = None  # reads files of this kind that are in leret's own format

    def fits(self, record: Fields) -> bool:
        return any(name in record for name in self.marks)

    def tasks(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        for record, reader in self._records(data, problems, documents=False):
            with problems.at(record.place):
                _refuse_unanswerable(record.value)
                task = reader.task(record.value)
                yield (
                    record,
                    task if task.split or not record.split else replace(task, split=record.split),
                )

    def documents(
        self, data: FileSettings, problems: Problems
    ) -> Iterator[tuple[Record, Document]]:
        for record, reader in self._records(data, problems, documents=True):
            with problems.at(record.place):
                yield from ((record, document) for document in reader.in_record(record.value))

    def _records(
        self, data: FileSettings, problems: Problems, documents: bool
    ) -> Iterator[tuple[Record, FileReader]]:
        reader: FileReader | None = None
        source = (documents and data.corpus) or data.questions
        rows = self.rows(source, problems)
        for record in renamed(rows, data.fields, source, documents) if data.fields else rows:
            other = self.alternative
            reader = reader or (other if other is not None and other.fits(record.value) else self)
            yield record, reader

    def rows(self, source: str, problems: Problems) -> Iterator[Record]:
        """Yield the records of a file or a data set on the Hub, with the source's own column names."""
        return _hub_records(source) if source.startswith(HUB) else records(Path(source), problems)


def _hub_records(source: str) -> Iterator[Record]:
    """Stream the rows of a data set on the Hub, from the named split or from all splits."""
    import httpx

    datasets = import_optional("datasets", "datasets", "train")
    name, _, split = source.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    try:
        parts = datasets.load_dataset(name, config or None, streaming=True)
        if split and split not in parts:
            raise DataError(
                f"{source}: no split {split!r}; available: {', '.join(map(str, parts))}"
            )
        number = 0
        for part in [split] if split else list(parts):
            for row in parts[part]:
                number += 1
                yield Record(
                    f"{source} {part}: row {number}", number, dict(row), SPLITS.get(str(part))
                )
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = "check the name and the network, or download the files and set their paths"
        raise DataError(
            f"{source}: cannot be loaded from the Hugging Face Hub ({cause}); {advice}"
        ) from error


def sentences(value: Any, title: str) -> str:
    """Return the text of a document, given as a list of sentences or as one string."""
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, Sequence) or not all(isinstance(sentence, str) for sentence in value):
        raise BadRecord(
            "wrong type",
            f"the text of {title!r} is {str(value)[:60]}; it should be a list of sentences",
        )
    return " ".join(sentence.strip() for sentence in value)


def text(record: Fields, *names: str) -> str:
    """Return the first of the named fields that exists; it must be a non-blank string or a whole number (an id)."""
    name, value = _find(record, names)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadRecord("empty field", f"field {name!r} is empty")
    if not isinstance(value, str) and type(value) is not int:
        raise wrong(name, value, "a string")
    return str(value)


def optional_text(record: Fields, name: str) -> str | None:
    """Return a string field, or None if the field is absent, null or blank."""
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(name, value, "a string")
    return value if value and value.strip() else None


def optional_number(record: Fields, name: str) -> int | None:
    """Return a whole-number field (text in a CSV file); None if the field is absent, null or blank."""
    value = record.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if type(value) is not int and not (isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value)):
        raise wrong(name, value, "a whole number")
    return int(value)


def split(record: Fields) -> SplitName | None:
    """Return the field ``split`` under leret's name; None if it is absent, null or blank."""
    name = optional_text(record, "split")
    if name is not None and name not in SPLITS:
        raise BadRecord(
            "unknown split", f"field 'split' is {name!r}; it should be train, dev or test"
        )
    return None if name is None else SPLITS[name]


def text_list(record: Fields, name: str, *, may_be_blank: bool = False) -> tuple[str, ...]:
    """Return a list of non-blank strings without duplicates; empty if the field is absent, null or blank.

    The field may also be a single string or whole number, or (in a CSV file) a list written as JSON. With
    ``may_be_blank``, blank and null items are left out; otherwise they are a fault.
    """
    value = record.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (RecursionError, ValueError) as error:
            raise wrong(name, value, 'one value, or a list in JSON, as in ["d7", "d2"]') from error
    texts = dict[str, None]()
    for item in (
        value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    ):
        text = str(item) if type(item) is int else item
        is_blank = text is None or (isinstance(text, str) and not text.strip())
        if is_blank and may_be_blank:
            continue
        if is_blank or not isinstance(text, str):
            raise wrong(name, item, "a list of non-empty strings")
        texts[text] = None
    return tuple(texts)


def answers(record: Fields, *names: str) -> tuple[str, ...]:
    """Return the reference answers in the fields, without duplicates. A blank or null answer is no reference."""
    texts: list[str] = []
    for name in names:
        value = record.get(name)
        if name == "answer" and isinstance(
            value, str
        ):  # never a list, even if it begins with a bracket
            texts += [value] if value.strip() else []
        else:
            texts += text_list(record, name, may_be_blank=True)
    return tuple(dict.fromkeys(texts))


def _refuse_unanswerable(record: Fields) -> None:
    for name, values in _UNANSWERABLE.items():
        if name in record and str(record[name]).strip().lower() in values:
            raise LeftOut("marked as unanswerable")


def rows(record: Fields, name: str, first: str, second: str) -> list[tuple[Any, Any]]:
    """Return the (a, b) pairs of a field, which may be a mapping with the keys ``first`` and ``second``.

    The field is ``[[a, b], ...]``, ``{first: [a, ...], second: [b, ...]}`` or ``[{"key": a, "value": b}, ...]``.
    """
    _, value = _find(record, (name,))
    if isinstance(value, Mapping):
        left, right = value.get(first), value.get(second)
        if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
            return list(zip(left, right, strict=True))
        raise wrong(name, value, f"two lists of equal length, {first!r} and {second!r}")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise wrong(name, value, f"a list of [{first}, {second}]")
    pairs = [tuple(item.values()) if isinstance(item, Mapping) else item for item in value]
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise wrong(name, pair, f"[{first}, {second}]")
    return [(pair[0], pair[1]) for pair in pairs]


def wrong(name: str, value: Any, expected: str) -> BadRecord:
    """Return the error for a field of the wrong type."""
    fault = f"field {name!r} is {str(value)[:60]!r} ({type(value).__name__})"
    return BadRecord("wrong type", f"{fault}; it should be {expected}")


def _find(record: Fields, names: Sequence[str]) -> tuple[str, Any]:
    for name in names:
        if name in record:
            return name, record[name]
    expected = " or ".join(repr(name) for name in names)
    raise BadRecord(
        "missing field", f"field {expected} is missing; the fields are {names_in(record)}"
    )


def names_in(record: Fields) -> str:
    """Return the names of a record's fields for a message, with the user's names of mapped columns."""
    names = record.columns if isinstance(record, Renamed) else record
    return ", ".join(map(repr, names)) or "none"
