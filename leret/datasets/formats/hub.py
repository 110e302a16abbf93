"""Records of a data set on the Hugging Face hub, through ``datasets``, as a stream.

A place on the hub is written ``hf:NAME``, ``hf:NAME:CONFIG`` or ``hf:NAME:CONFIG@SPLIT``, as in
``hf:hotpotqa/hotpot_qa:distractor@validation``. Without a split, all of them are read, and the tasks keep theirs
(validation is ``dev``).
"""

from __future__ import annotations

from collections.abc import Iterator

from leret.core.errors import DataError, MissingDependency
from leret.datasets.records import Record
from leret.datasets.splits import SPLITS

PREFIX = "hf:"


def hub_records(source: str) -> Iterator[Record]:
    """Rows of a data set, named as the module says; DataError where the hub cannot be reached or has none such."""
    try:
        import datasets
        import httpx
    except ImportError as error:
        raise MissingDependency("datasets", "train") from error

    name, _, split = source.removeprefix(PREFIX).partition("@")
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
