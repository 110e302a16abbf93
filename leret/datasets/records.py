"""Stream a file (JSON, CSV, TSV, Parquet) as records or as lines, and collect its faults."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ijson  # type: ignore[import-untyped]
from ijson.common import ObjectBuilder  # type: ignore[import-untyped]

from leret.config.data import DataSettings, FileSettings
from leret.core.errors import DataError, reason
from leret.core.types import Document, Task

MAX_RECORD = 64 * 2**20  # maximum bytes per line; keeps a binary file out of memory
_MAX_DEPTH = 200
_SHOWN = 10  # maximum number of faults per message
_PLACES = 4  # maximum number of places per fault
_FIELDS = (
    "a question has id, question, relevant_doc_ids "
    "(optional: answer, answers, inputs, type, hops, split, relevance); "
    "a document has doc_id, title, text; "
    "set data.fields (`leret init --field NAME=COLUMN`) to read other columns"
)
_TABLE = re.compile(r"\.([ct])sv(\.(gz|bz2|zst))?$", re.IGNORECASE)
# NUL, or a byte that is not UTF-8 (as `surrogateescape` decodes it)
_BAD_CHARACTER = re.compile("[\0\udc80-\udcff]")
_TRUNCATED = "Truncated"  # part of Arrow's message about a truncated Zstandard file


class BadRecord(Exception):
    """A bad record. Readers catch it and count it by ``kind``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class LeftOut(Exception):
    """A sound record that readers leave out and count. The text is its kind."""


class Problems:
    """Bad records of a file: counts by kind, and the first distinct faults with their places.

    ``left_out`` counts, by kind, what readers leave out or doubt without an error.
    """

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self._faults: dict[str, list[str]] = {}  # first places per fault
        self._times: Counter[str] = Counter()

    def add(self, place: str, problem: BadRecord) -> None:
        """Add a bad record. ``place`` is its file and line, or file and item."""
        self.kinds[problem.kind] += 1
        fault = str(problem)
        if fault in self._faults or len(self._faults) < _SHOWN:
            self._times[fault] += 1
            first_places = self._faults.setdefault(fault, [])
            if len(first_places) < _PLACES:
                first_places.append(place)

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Add the bad record that the block raises, or count the record that it leaves out."""
        try:
            yield
        except BadRecord as problem:
            self.add(place, problem)
        except LeftOut as kind:
            self.left_out[str(kind)] += 1

    @property
    def skipped(self) -> Counter[str]:
        """Counts for messages, by kind."""
        return self.kinds + self.left_out

    @property
    def shown(self) -> list[str]:
        """First distinct faults, one line each, with their places and numbers of records."""
        lines = []
        for fault, (place, *more) in self._faults.items():
            line = f"{place}: {fault}"
            if more:
                n = self._times[fault]
                at = ", ".join(later.rpartition(":")[2] for later in more)
                if n > _PLACES:
                    at += " ..."
                line += f" ({n:,} records: also {at})"
            lines.append(line)
        return lines

    def check(self, source: str, skip_invalid: bool, any_good: bool = True) -> None:
        """Raise a DataError if there are bad records.

        With ``skip_invalid``, raise it only if no record is good.
        """
        n = self.kinds.total()
        if not n or (skip_invalid and any_good):
            return
        lines = self.shown
        n_more = n - self._times.total()
        if n_more:
            lines.append(f"and {n_more:,} more")
        if self.kinds["missing field"]:
            lines.append(_FIELDS)
        faults = "\n  ".join(lines)
        noun = "record" if n == 1 else "records"
        advice = (
            ", or skip them with --set data.skip_invalid=true (leret init: --skip-invalid)"
            if any_good
            else ""
        )
        raise DataError(f"{source}: {n} bad {noun}\n  {faults}\nfix them{advice}")


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object, or one row of a table."""

    place: str  # file and line, or file and item, for messages
    number: int  # number of the line or item, from 1
    value: Mapping[str, Any]
    split: str | None = None  # split in a data set on the Hugging Face Hub, if known


class Reader(ABC):
    """Reads one kind of `data`.

    Bad records go to ``problems``; an unusable source is a DataError.
    """

    settings: ClassVar[type[DataSettings]] = FileSettings
    """Settings class of the recipe section `data`."""
    brings_documents = False
    """True if the question file also has documents, so that `data.corpus` is optional."""
    repeats_documents = False
    """True if a document may occur in several records; its first occurrence counts."""

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Return True if a file with this first record is of this kind."""
        return False

    def fits_folder(self, folder: Path) -> bool:
        """Return True if the files of a folder are of this kind."""
        return False

    @abstractmethod
    def tasks(self, data: Any, problems: Problems) -> Iterator[tuple[Record, Task]]:
        """Yield each task with its record."""

    @abstractmethod
    def documents(self, data: Any, problems: Problems) -> Iterator[tuple[Record, Document]]:
        """Yield each document with its record."""


def records(path: Path, problems: Problems) -> Iterator[Record]:
    """Yield the objects in JSON lines or a JSON array, or the rows of a table; DataError if broken.

    A blank cell of a CSV or TSV file is an empty text.
    """
    start = _start(path)
    table = _TABLE.search(path.name)
    if start == b"PAR1":
        items = _parquet_rows(path)
    elif table and start[:1] not in b"[{":
        items = _table_rows(path, problems, table[1] in "tT")
    else:
        items = _items(path) if start[:1] == b"[" else _json_lines(path, problems)
    for place, number, value in items:
        if isinstance(value, dict):
            yield Record(place, number, value)
        else:
            fault = f"{type(value).__name__}, not a JSON object: {str(value)[:60]!r}"
            problems.add(place, BadRecord("not an object", fault))


def lines(path: Path, problems: Problems, ends: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines of a file, numbered from 1.

    The characters ``ends`` (default: white space) around them are removed.

    DataError if the file cannot be read or a line is longer than `MAX_RECORD`.
    """
    number = 0
    with open_compressed(path) as file:
        try:
            while raw := file.readline(MAX_RECORD + 1):
                number += 1
                if len(raw) > MAX_RECORD:
                    fault = f"a line is longer than {MAX_RECORD >> 20} MiB"
                    raise DataError(
                        f"{path}: {fault}, so the file is not JSON lines; choose another file"
                    )
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                try:
                    line = raw.decode("utf-8").strip(ends)
                except UnicodeDecodeError as error:
                    fault = f"not UTF-8 at byte {error.start} of the line"
                    problems.add(f"{path}:{number}", BadRecord("not UTF-8", fault))
                    continue
                if line and not line.isspace():
                    yield number, line
        except (EOFError, OSError) as error:
            if not _ends_early(error):
                raise
            fault = "the compressed file ends early; download it again"
            problems.add(f"{path}:{number + 1}", BadRecord("truncated", fault))


@contextmanager
def open_compressed(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file, and decompress gzip, bzip2 and Zstandard (detected by magic bytes)."""
    try:
        with path.open("rb") as file:
            magic = file.peek(4)[:4]
            plain = file
            if magic.startswith(b"\x1f\x8b"):
                plain = io.BufferedReader(gzip.GzipFile(fileobj=file))
            elif magic.startswith(b"BZh"):
                plain = io.BufferedReader(bz2.BZ2File(file))
            elif magic == b"\x28\xb5\x2f\xfd":
                import pyarrow as pa  # import takes 0.2 s

                plain = io.BufferedReader(pa.CompressedInputStream(file, "zstd"))
            yield plain
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except IsADirectoryError as error:
        raise DataError(
            f"{path} is a directory; choose a file in it (only beir and medquad read folders)"
        ) from error
    except PermissionError as error:
        raise DataError(f"{path}: permission denied; make the file readable") from error
    except (EOFError, OSError, zlib.error) as error:
        fault = "ends early" if _ends_early(error) else f"is broken ({error})"
        raise DataError(f"{path}: the compressed file {fault}; download it again") from error


def _ends_early(error: Exception) -> bool:
    return isinstance(error, EOFError) or _TRUNCATED in str(error)


def _start(path: Path) -> bytes:
    """Return the first four bytes of a file after white space."""
    with open_compressed(path) as file:
        start = file.read(4)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(f"{path} is UTF-16; save it as UTF-8")
        first = start.removeprefix(codecs.BOM_UTF8).lstrip()
        while start and not first:
            start = file.read(1 << 16)
            first = start.removeprefix(codecs.BOM_UTF8).lstrip()
        if not start:
            raise DataError(f"{path} is empty; choose a file with records")
        return first[:4]


def _json_lines(path: Path, problems: Problems) -> Iterator[tuple[str, int, Any]]:
    for number, line in lines(path, problems):
        place = f"{path}:{number}"
        try:
            value = json.loads(line, object_pairs_hook=_object)
        except BadRecord as problem:
            problems.add(place, problem)
        except (RecursionError, ValueError) as error:  # RecursionError: nested too deeply
            cause = str(error)
            if isinstance(error, json.JSONDecodeError):
                cause = f"{error.msg} at column {error.colno}"
            fault = f"broken JSON ({cause}): {line[:60]!r}"
            problems.add(place, BadRecord("broken JSON", fault))
        else:
            yield place, number, value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise BadRecord("key twice", _twice("key", key))
        value[key] = item
    return value


def _twice(what: str, name: str) -> str:
    return f"{what} {name!r} occurs more than once; rename or remove one"


def _table_rows(path: Path, problems: Problems, is_tsv: bool) -> Iterator[tuple[str, int, Any]]:
    """Yield the rows of a CSV or TSV file by the columns of its header.

    Blank rows and unnamed columns are ignored.
    """
    columns: list[str] = []
    for number, cells in _cells(path, problems, is_tsv):
        place = f"{path}:{number}"
        if not columns:
            columns = [name.strip() for name in cells]
            _check_columns(place, columns)
        elif len(cells) != len(columns):
            fault = f"{len(cells)} cells, but the header has {len(columns)} columns"
            advice = "a cell cannot contain a tab" if is_tsv else "put a cell with commas in quotes"
            problems.add(place, BadRecord("broken table", f"{fault}; {advice}"))
        else:
            row = dict(zip(columns, cells, strict=True))
            row.pop("", None)  # unnamed columns
            yield place, number, row


def _check_columns(place: str, columns: list[str]) -> None:
    """Raise a DataError if two columns have the same name."""
    for index, name in enumerate(columns):
        if name and name in columns[:index]:
            raise DataError(f"{place}: {_twice('column', name)}")


def _cells(path: Path, problems: Problems, is_tsv: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each row with the number of its first line.

    In a TSV file, a quote is a character.

    A row of CSV that is broken after its first line may have swallowed other rows, so it is a
    DataError.
    """
    csv.field_size_limit(MAX_RECORD)
    current: list[str] = []  # lines of the row
    with open_compressed(path) as file:
        first = file.peek().partition(b"\n")[0]
        delimiter = max(",;\t", key=lambda character: first.count(character.encode()))
        rows = csv.reader(
            _table_lines(path, file, current),
            delimiter="\t" if is_tsv else delimiter,
            quoting=csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL,
            strict=True,
        )
        n_columns = 0
        while True:
            number = rows.line_num + 1
            current.clear()
            try:
                cells = next(rows, None)
            except csv.Error as error:
                if len(current) > 1:
                    advice = "close it, or write a quote in a quoted cell twice"
                    raise DataError(
                        f"{path}:{number}: the row opens a quote that is not closed; {advice}"
                    ) from error
                problems.add(f"{path}:{number}", BadRecord("broken table", f"broken CSV ({error})"))
                continue
            if cells is None:
                return
            n_columns = n_columns or len(cells)
            if _are_rows(current, delimiter, n_columns):
                fault = f"a quoted cell joins {len(current)} lines that look like rows"
                raise DataError(f"{path}:{number}: {fault}; remove its quotes")
            if any(map(str.strip, cells)):
                yield number, cells


def _are_rows(current: list[str], delimiter: str, n_columns: int) -> bool:
    """Check whether each of several lines has the cells of a row.

    In prose, a space follows a comma.
    """
    counts = [len(re.findall(f"{delimiter}(?! )", line)) for line in current if line.strip()]
    return n_columns > 1 and len(counts) > 1 and set(counts) == {n_columns - 1}


def _table_lines(path: Path, file: io.BufferedReader, current: list[str]) -> Iterator[str]:
    """Yield the lines of a table, and add each to ``current``."""
    with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        for number, line in enumerate(text, 1):
            if _BAD_CHARACTER.search(line):
                raise DataError(
                    f"{path}:{number}: the line has a NUL or is not UTF-8; save the file as UTF-8"
                )
            current.append(line)
            yield line


def _parquet_rows(path: Path) -> Iterator[tuple[str, int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(str(path), file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", number, row
    # ValueError: text that is not UTF-8
    except (OSError, OverflowError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: row {number + 1} cannot be read ({reason(error)}); write the file again"
        ) from error


def _items(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield the items of a JSON array.

    ``ijson.items`` is not used: its memory grows with the square of the depth.
    """
    number = 0
    depth = 0
    item = ObjectBuilder()
    keys: list[set[str]] = []  # of the open objects
    try:
        with open_compressed(path) as file:
            if file.peek(3).startswith(codecs.BOM_UTF8):
                file.read(3)
            for event, value in ijson.basic_parse(file, use_float=True):
                if event in {"start_map", "start_array"}:
                    depth += 1
                elif event in {"end_map", "end_array"}:
                    depth -= 1
                if depth > _MAX_DEPTH:
                    raise DataError(
                        f"{path}: item {number + 1} is nested more than {_MAX_DEPTH} deep; "
                        "fix the file"
                    )
                if depth == 0 or (depth == 1 and event == "start_array"):
                    continue
                if event == "start_map":
                    keys.append(set())
                elif event == "end_map":
                    keys.pop()
                elif event == "map_key":
                    if value in keys[-1]:
                        raise DataError(f"{path}: item {number + 1}: {_twice('key', value)}")
                    keys[-1].add(value)
                item.event(event, value)
                if depth == 1:
                    number += 1
                    yield f"{path}: item {number}", number, item.value
                    item = ObjectBuilder()
    except (ijson.JSONError, ValueError) as error:  # ValueError: a number of over 4,300 digits
        fault = str(error).removeprefix("b'").replace("\\n", "\n").splitlines()[0]
        raise DataError(
            f"{path}: item {number + 1}: broken JSON ({fault}); fix the file"
        ) from error
