"""Records of a data set on the Hugging Face hub, through ``datasets``, as a stream.

A place on the hub is written ``hf:NAME``, ``hf:NAME:CONFIG`` or ``hf:NAME:CONFIG@SPLIT``, as in
``hf:hotpotqa/hotpot_qa:distractor@validation``. Without a split, all of them are read, and the questions keep theirs
(validation is ``dev``).
"""

from __future__ import annotations

from collections.abc import Iterator

from leret.core.errors import DataError
from leret.datasets.formats.jsonl import SPLITS
from leret.datasets.records import Record

PREFIX = "hf:"


def hub_records(source: str) -> Iterator[Record]:
    """Rows of a data set.

    Args:
        source: as the module says.

    Raises:
        DataError: the hub cannot be reached, or it has no such data set, configuration or split.
    """
    import datasets
    import httpx

    name, _, split = source.removeprefix(PREFIX).partition("@")
    name, _, config = name.partition(":")
    try:
        found = datasets.load_dataset(name, config or None, streaming=True)
        wanted = [split] if split else list(found)
        if split and split not in found:
            raise DataError(f"{source}: there is no split {split!r}; there are {', '.join(map(str, found))}")
        number = 0
        for part in wanted:
            for row in found[part]:
                number += 1
                yield Record(f"{source} {part}: row {number}", number, dict(row), SPLITS.get(str(part)))
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{source}: cannot be had from the hub ({_first_line(error)}); "
            "check the name and the network, or download the files and name their paths"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
