"""JSON objects of a file, one after the other, with their places: JSON lines or one large array."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.datasets.lines import MAX_RECORD, chunks, lines
from leret.datasets.problems import BadRecord, Problems
from leret.errors import DataError

__all__ = ["Record", "records"]

_DECODER = json.JSONDecoder()
_NEAR_END = 10
"""Characters: an escape or a number cut off by the end of the buffer is reported this close to it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object.

    Attributes:
        place: file and line, or file and item: how messages point at it.
        number: of the line or the item, from 1.
        value: its content.
        split: the part of a published data set that it came from, where known.
    """

    place: str
    number: int
    value: Mapping[str, Any]
    split: str | None = None


def records(path: Path, problems: Problems) -> Iterator[Record]:
    """Objects of a file of JSON lines or of a file that is one JSON array, told by its first character.

    One record is in memory at a time. Bad lines and items are added to ``problems``.

    Raises:
        DataError: the file cannot be read, or its array is broken.
    """
    items = _items(path) if _first_character(path) == "[" else _json_lines(path, problems)
    for place, number, value in items:
        if isinstance(value, dict):
            yield Record(place, number, value)
        else:
            found = f"{type(value).__name__} where a JSON object should be: {str(value)[:60]!r}"
            problems.add(place, BadRecord("not an object", found))


def _first_character(path: Path) -> str:
    for chunk in _whole(path):
        start = chunk.lstrip()
        if start:
            return chr(start[0])
    raise DataError(f"{path} is blank; give a file with one record at least")


def _whole(path: Path) -> Iterator[bytes]:
    """`chunks`, an early end being a fault of the file."""
    try:
        yield from chunks(path)
    except EOFError as error:
        raise DataError(f"{path}: the compressed file ends early; get it again") from error


def _json_lines(path: Path, problems: Problems) -> Iterator[tuple[str, int, Any]]:
    for number, line in lines(path, problems):
        place = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            found = f"broken JSON ({error.msg} at column {error.colno}): {line[:60]!r}"
            problems.add(place, BadRecord("broken JSON", found))
        except (RecursionError, ValueError) as error:  # nested too deep; an integer of thousands of digits
            problems.add(place, BadRecord("broken JSON", f"JSON that cannot be read ({error})"))
        else:
            yield place, number, value


def _items(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Elements of one JSON array, decoded from a window that moves over the file."""
    window = _Window(path)
    window.skip("[")
    number = 0
    while (mark := window.peek()) != "]":
        if number and mark == ",":
            window.skip(",")
        elif number:
            raise DataError(f"{path}: broken JSON after item {number}, line {window.line}: a comma or ] is missing")
        number += 1
        window.peek()
        line = window.line
        yield f"{path}: item {number} (line {line})", number, window.value(number)


class _Window:
    """The part of a file that is being decoded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chunks = _whole(path)
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self.line = 1

    def peek(self) -> str:
        """The next character that is not space."""
        while True:
            for i in range(self._at, len(self._text)):
                if not self._text[i].isspace():
                    self._move(i)
                    return self._text[i]
            self._move(len(self._text))
            if not self._more(1):
                raise DataError(f"{self._path}: the array has no end, it is cut off at line {self.line}; get it again")

    def skip(self, mark: str) -> None:
        """Step over the next character, which is ``mark``."""
        assert self.peek() == mark
        self._move(self._at + 1)

    def value(self, number: int) -> Any:
        """Decode the value that starts here.

        Raises:
            DataError: it is broken. Where the next one starts is unknown then, so there is no going on.
        """
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _NEAR_END
                size = len(self._text) - self._at
                if cut_off and size < MAX_RECORD and self._more(size):
                    continue
                what = "the file is cut off, or " if cut_off else ""
                raise DataError(
                    f"{self._path}: item {number}, line {self.line + error.doc.count(chr(10), self._at, error.pos)}: "
                    f"{what}broken JSON ({error.msg}); the rest of an array cannot be read after it, mend the file"
                ) from error
            except (RecursionError, ValueError) as error:
                place = f"{self._path}: item {number}, line {self.line}"
                raise DataError(f"{place}: JSON that cannot be read ({error}); mend the file") from error
            self._move(end)
            return value

    def _move(self, at: int) -> None:
        self.line += self._text.count("\n", self._at, at)
        self._at = at

    def _more(self, size: int) -> bool:
        """Add at least as many characters as there are, so that a long value is tried a few times only."""
        parts = [self._text[self._at :]]
        added = 0
        try:
            for chunk in self._chunks:
                parts.append(self._decode.decode(chunk))
                added += len(parts[-1])
                if added >= size:
                    break
            else:
                self._decode.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: not UTF-8 after line {self.line}; save the file as UTF-8") from error
        self._text = "".join(parts)
        self._at = 0
        return added > 0
