"""Readers for each kind of `data`.

To add a kind, add a file to this package and a line to `READERS`.
"""

from __future__ import annotations

from pathlib import Path

from leret.config.data import DataSettings
from leret.config.messages import nearest
from leret.core.errors import DataError
from leret.datasets.formats.base import HUB
from leret.datasets.formats.beir import BeirReader
from leret.datasets.formats.jsonl import CHUNKS, JSONL
from leret.datasets.formats.official import EPISODES, HOTPOTQA, HOVER, MUSIQUE, TWO_WIKI
from leret.datasets.records import Problems, Reader, records
from leret.datasets.world.generate import WorldReader

__all__ = ["READERS", "Reader", "detect_kind", "reader_of"]

READERS: dict[str, Reader] = {
    "jsonl": JSONL,
    "beir": BeirReader(),
    "chunks": CHUNKS,
    "hover": HOVER,
    "musique": MUSIQUE,
    "2wiki": TWO_WIKI,
    "hotpotqa": HOTPOTQA,
    "episodes": EPISODES,
    "world": WorldReader(),
}
"""Readers by kind.

`detect_kind` tries them in order: 2wiki before hotpotqa, because 2wiki files fit both.
"""


DataSettings.table = READERS


def reader_of(kind: str) -> Reader:
    """Return the reader for a kind of data; DataError for an unknown name."""
    reader: Reader | None = DataSettings.find(kind)
    if reader is None:
        raise DataError(
            f"unknown data.kind {kind!r}{nearest(kind, READERS)}; available: {', '.join(READERS)}"
        )
    return reader


def detect_kind(path: str) -> str:
    """Detect the kind of a question file from its first record, or of a folder from its files.

    If no kind fits, it is jsonl.
    """
    if path.startswith(HUB):
        return "jsonl"
    readers = {kind: reader_of(kind) for kind in (*READERS, *DataSettings.shelf)}
    if Path(path).is_dir():
        folders = [kind for kind, reader in readers.items() if reader.fits_folder(Path(path))]
        return folders[0] if folders else "beir"
    first = next(iter(records(Path(path), Problems())), None)
    return next(
        (kind for kind, reader in readers.items() if first and reader.fits(first.value)), "jsonl"
    )
