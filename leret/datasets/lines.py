"""Bytes of a file, as text lines with their numbers: plain, gzip, bzip2 or Zstandard, read as a stream.

The compression is told by a file's first bytes, not by its name.
"""

from __future__ import annotations

import bz2
import codecs
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from leret.datasets.problems import BadRecord, Problems
from leret.errors import DataError

__all__ = ["MAX_RECORD", "chunks", "lines"]

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
