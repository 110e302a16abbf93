"""What is wrong with a file: collected, so that it is mended once."""

from __future__ import annotations

import bz2
import codecs
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from leret.core.errors import DataError

_SHOWN = 20

FIELDS = (
    "in JSON lines a question has id, question, relevant_doc_ids (where known answer, type, hops, split, relevance), "
    "a document doc_id, title, text"
)


class BadRecord(Exception):
    """One record that is not what its file claims to hold; never leaves this package.

    Args:
        kind: a few words that records of one fault share; they are counted by it.
        message: what is wrong, with the value.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Problems:
    """Collects the bad records of one reading.

    Attributes:
        shown: the first of them, one line each: place and fault.
        kinds: how many there are of each kind.
    """

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.kinds: Counter[str] = Counter()

    def add(self, place: str, problem: BadRecord) -> None:
        """Take note of a bad record.

        Args:
            place: file and line, or file and item.
            problem: what is wrong there.
        """
        self.kinds[problem.kind] += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(f"{place}: {problem}")

    @property
    def n(self) -> int:
        """How many bad records there are."""
        return self.kinds.total()

    def check(self, source: str, skip_invalid: bool, any_good: bool = True) -> Mapping[str, int]:
        """End of the reading: refuse the source, or count what was skipped.

        Args:
            source: the file, as messages call it.
            skip_invalid: count.
            any_good: the source has records that are not bad; one without any is refused in any case.

        Returns:
            How many records were skipped, by kind of fault.

        Raises:
            DataError: there are bad records, and ``skip_invalid`` is off.
        """
        if not self.n or (skip_invalid and any_good):
            return dict(self.kinds)
        more = [f"and {self.n - len(self.shown)} more"] if self.n > len(self.shown) else []
        fields = [FIELDS] if self.kinds["missing field"] else []
        lines = "\n  ".join([*self.shown, *more, *fields])
        advice = ", or leave them out with data.skip_invalid (--skip-invalid), which counts them" if any_good else ""
        raise DataError(
            f"{source}: {self.n} bad {'record' if self.n == 1 else 'records'}\n  {lines}\nmend them{advice}"
        )


pass


MAX_RECORD = 64 * 2**20
"""Bytes of one record at most; without a bound, a binary file would be read into memory as one line."""

_CHUNK = 1 << 18
_ZSTD_CHUNK = 1 << 10
"""Four compressed bytes become 128 KiB at most, and the decompressor cannot be told to stop: 32 MiB at once."""
_BOMS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def chunks(path: Path) -> Iterator[bytes]:
    """Decompressed bytes of a file, in pieces, without a byte order mark.

    Raises:
        DataError: there is no such file, it is a directory, empty, not readable, or UTF-16.
        EOFError: the compressed file ends early. What came before it was handed out.
        OSError: the compressed file is broken.
    """
    pieces = _decompressed(path)
    first = b""
    for piece in pieces:
        first += piece
        if len(first) >= len(codecs.BOM_UTF8):
            break
    if not first:
        raise DataError(f"{path} is empty; give a file with one record at least")
    for mark, name in _BOMS.items():
        if first.startswith(mark):
            raise DataError(f"{path} is {name}; save it as UTF-8")
    yield first.removeprefix(codecs.BOM_UTF8)
    yield from pieces


def lines(path: Path, problems: Problems) -> Iterator[tuple[int, str]]:
    """Lines of a file that are not blank, numbered from 1, without their ends (LF or CRLF).

    A line that is not UTF-8 and a compressed file that ends early are added to ``problems``.

    Raises:
        DataError: as `chunks`, and a line is longer than `MAX_RECORD`.
    """
    number = 0
    try:
        for number, raw in enumerate(_split(path), start=1):
            try:
                line = raw.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                problems.add(f"{path}:{number}", BadRecord("not UTF-8", f"not UTF-8 at byte {error.start} of the line"))
                continue
            if line:
                yield number, line
    except EOFError:
        problems.add(f"{path}:{number + 1}", BadRecord("truncated", "the compressed file ends early; get it again"))


def _split(path: Path) -> Iterator[bytes]:
    rest: list[bytes] = []
    length = 0
    for chunk in chunks(path):
        *whole, tail = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line])
            rest, length = [], 0
        rest.append(tail)
        length += len(tail)
        if length > MAX_RECORD:
            raise DataError(f"{path}: a line is longer than {MAX_RECORD >> 20} MiB; this is not a file of JSON lines")
    if length:
        yield b"".join(rest)


def _decompressed(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            make, bound = _decompressor(file.read(4))
            file.seek(0)
            yield from iter(lambda: file.read(_CHUNK), b"") if make is None else _inflated(file, make, bound)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a directory; name a file in it (only kind beir reads a directory)") from error
    except PermissionError as error:
        raise DataError(f"{path}: no permission to read it") from error
    except _broken() as error:
        raise DataError(f"{path}: the compressed file is broken ({error}); get it again") from error


def _decompressor(magic: bytes) -> tuple[Callable[[], Any] | None, int | None]:
    """What makes a decompressor for one member of a file that starts so, None for plain text; the output it bounds."""
    if magic.startswith(b"\x1f\x8b"):
        return lambda: zlib.decompressobj(wbits=31), _CHUNK
    if magic.startswith(b"BZh"):
        return bz2.BZ2Decompressor, _CHUNK
    if magic == b"\x28\xb5\x2f\xfd":
        import zstandard

        return lambda: zstandard.ZstdDecompressor().decompressobj(), None
    return None, None


def _inflated(file: BinaryIO, make: Callable[[], Any], bound: int | None) -> Iterator[bytes]:
    member = make()
    started = False
    while data := file.read(bound or _ZSTD_CHUNK):
        going = True
        while going:
            started = True
            piece = member.decompress(data) if bound is None else member.decompress(data, bound)
            yield piece
            data = getattr(member, "unconsumed_tail", b"")  # bz2 holds it back itself
            going = len(piece) == bound
            if member.eof:
                data, member, started = member.unused_data, make(), False
                going = bool(data)
    if started:
        raise EOFError("the compressed file ends early")


def _broken() -> tuple[type[Exception], ...]:
    """What decompressors raise; zstandard's own is there only when it was loaded."""
    import sys

    zstandard = sys.modules.get("zstandard")
    return (zlib.error, OSError, *((zstandard.ZstdError,) if zstandard else ()))


pass
pass


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
