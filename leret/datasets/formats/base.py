"""A format: how one record of a file becomes a task, and how it becomes documents; and the fields of records.

Records may also come from the Hugging Face hub, through ``datasets``: ``hf:NAME``, ``hf:NAME:CONFIG`` or
``hf:NAME:CONFIG@SPLIT``, as in ``hf:hotpotqa/hotpot_qa:distractor@validation``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from leret.config.data import FileSettings
from leret.core.errors import DataError, import_optional
from leret.core.types import Document, Task
from leret.datasets.records import BadRecord, Problems, Record, records
from leret.datasets.splits import SPLITS

Fields = Mapping[str, Any]
HUB = "hf:"


class Reader(Protocol):
    """Reads one kind of `data`. Bad records go to ``problems``; DataError where the source as a whole is none."""

    @property
    def brings_documents(self) -> bool:
        """The source of the tasks holds documents too, so that `data.corpus` may be absent."""

    @property
    def repeats_documents(self) -> bool:
        """The same document may come again, in another question's context; the first one is kept."""

    def fits(self, record: Fields) -> bool:
        """Whether a file that begins with this record is of this kind."""

    def tasks(self, data: Any, problems: Problems) -> Iterator[tuple[Record, Task]]:
        """Tasks with the records they come from."""

    def documents(self, data: Any, problems: Problems) -> Iterator[tuple[Record, Document]]:
        """Documents with the records they come from."""


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads files of JSON records, or a data set of the hub. Its functions raise `BadRecord`."""

    task: Callable[[Fields], Task]
    in_record: Callable[[Fields], Iterable[Document]]  # one in a corpus, many in the contexts of a question file
    marks: tuple[str, ...]  # names of fields, of which its first record has one
    brings_documents: bool = False
    repeats_documents: bool = False
    own: FileReader | None = None  # reads the records instead where their fields are leret's own, whatever the kind

    def fits(self, record: Fields) -> bool:
        return any(name in record for name in self.marks)

    def tasks(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        for record, reader in self._records(data.questions, problems):
            try:
                task = reader.task(record.value)
            except BadRecord as problem:
                problems.add(record.place, problem)
            else:
                yield record, task if task.split or not record.split else replace(task, split=record.split)

    def documents(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Document]]:
        for record, reader in self._records(data.corpus or data.questions, problems):
            try:
                yield from ((record, document) for document in reader.in_record(record.value))
            except BadRecord as problem:
                problems.add(record.place, problem)

    def _records(self, source: str, problems: Problems) -> Iterator[tuple[Record, FileReader]]:
        reader: FileReader | None = None
        for record in _hub_records(source) if source.startswith(HUB) else records(Path(source), problems):
            reader = reader or (self.own if self.own is not None and self.own.fits(record.value) else self)
            yield record, reader


def _hub_records(source: str) -> Iterator[Record]:
    """Rows of a data set on the hub, as a stream: of the split that the source names, or of all, with their splits."""
    import httpx

    datasets = import_optional("datasets", "datasets", "train")
    name, _, split = source.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    try:
        found = datasets.load_dataset(name, config or None, streaming=True)
        if split and split not in found:
            raise DataError(f"{source}: there is no split {split!r}; there are {', '.join(map(str, found))}")
        number = 0
        for part in [split] if split else list(found):
            for row in found[part]:
                number += 1
                yield Record(f"{source} {part}: row {number}", number, dict(row), SPLITS.get(str(part)))
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{source}: cannot be had from the hub ({what}); "
            "check the name and the network, or download the files and name their paths"
        ) from error


def sentences(value: Any, title: str) -> str:
    """Text of a document that is kept as a list of sentences, or as one string."""
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, Sequence) or not all(isinstance(sentence, str) for sentence in value):
        raise BadRecord("wrong type", f"the text of {title!r} is {str(value)[:60]}; it should be a list of sentences")
    return " ".join(sentence.strip() for sentence in value)


def text(record: Fields, *names: str) -> str:
    """A string that is not blank, under the first of the names that is there."""
    name, value = _find(record, names)
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    if not value.strip():
        raise BadRecord("empty field", f"field {name!r} is empty")
    return value


def optional_text(record: Fields, name: str) -> str | None:
    """A string, or None where it is absent or null."""
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(name, value, "a string")
    return value


def optional_number(record: Fields, name: str) -> int | None:
    """A whole number, or None where it is absent or null."""
    value = record.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise wrong(name, value, "a whole number")
    return value


def text_list(record: Fields, name: str) -> tuple[str, ...]:
    """Strings that are not blank, no string twice; none where it is absent or null."""
    value = record.get(name)
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise wrong(name, value, "a list of strings")
    for item in value:
        if not isinstance(item, str) or not item.strip():
            raise wrong(name, item, "strings that are not empty, item by item")
    return tuple(dict.fromkeys(value))


def rows(record: Fields, name: str, first: str, second: str) -> list[tuple[Any, Any]]:
    """Pairs under a name: ``[[a, b], ...]``, or as a hub's tables hold them.

    Those are ``{first: [a, ...], second: [b, ...]}`` and ``[{"key": a, "value": b}, ...]``.
    """
    _, value = _find(record, (name,))
    if isinstance(value, Mapping):
        left, right = value.get(first), value.get(second)
        if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
            return list(zip(left, right, strict=True))
        raise wrong(name, value, f"lists of one length under {first!r} and {second!r}")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise wrong(name, value, f"a list of [{first}, {second}]")
    pairs = [tuple(item.values()) if isinstance(item, Mapping) else item for item in value]
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise wrong(name, pair, f"[{first}, {second}]")
    return [(pair[0], pair[1]) for pair in pairs]


def wrong(name: str, value: Any, wanted: str) -> BadRecord:
    """A field of another type."""
    return BadRecord(
        "wrong type", f"field {name!r} is {str(value)[:60]!r} ({type(value).__name__}); it should be {wanted}"
    )


def _find(record: Fields, names: Sequence[str]) -> tuple[str, Any]:
    for name in names:
        if name in record:
            return name, record[name]
    wanted = " or ".join(repr(name) for name in names)
    raise BadRecord(
        "missing field", f"field {wanted} is missing; the fields are {', '.join(map(repr, record)) or 'none'}"
    )
