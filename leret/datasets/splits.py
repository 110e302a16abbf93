"""Split tasks by hash of their ids, and check that training and evaluation share no tasks.

A split depends only on the id and the seed, not on the file, the order, or the number of tasks. Data sets with
splits (BEIR's qrels, a generated world) keep their splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal

from leret.core.errors import DataError
from leret.core.types import Task

SplitName = Literal["train", "dev", "test"]
SPLITS: dict[str, SplitName] = {
    "train": "train", "training": "train", "dev": "dev", "val": "dev", "valid": "dev", "validation": "dev",
    "test": "test",
}  # fmt: skip
"""leret's name for each split name that data sets use."""
_DEV, _TEST = 0.1, 0.2
_SHOWN = 5


def split_of(id: str, seed: int = 0) -> SplitName:
    """Return the split of an id: ``test`` for 20 % of ids, ``dev`` for 10 %, ``train`` for the rest.

    >>> {split_of(f"q{i}") for i in range(100)} == {"train", "dev", "test"}
    True
    """
    share = rank_of(id, seed, "split") / 2**64
    return "test" if share < _TEST else "dev" if share < _TEST + _DEV else "train"


def rank_of(id: str, seed: int, purpose: str) -> int:
    """Return a pseudo-random number in [0, 2**64) that depends on the id, the seed, and the purpose."""
    key = f"leret {purpose} {seed}\0{id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


def refuse_leak(training_ids: Iterable[str], evaluation_ids: Iterable[str]) -> None:
    """Raise a DataError if training and evaluation have ids in common. Its message lists the first ids."""
    _refuse(
        sorted(set(training_ids) & set(evaluation_ids)),
        "are in both the training data and the evaluation split",
        "sample from split train, and evaluate on dev or test with the same seed",
    )


def refuse_doubles(training: Iterable[Task], evaluation: Iterable[Task]) -> None:
    """Raise a DataError if a training task and an evaluation task have the same text."""
    texts = {task.text for task in training}
    _refuse(
        [task.id for task in evaluation if task.text in texts],
        "of the evaluation split have the same text as a training question",
        "remove them from the question file",
    )


def _refuse(ids: Sequence[str], fault: str, advice: str) -> None:
    if ids:
        shown = ", ".join(repr(id) for id in ids[:_SHOWN])
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        raise DataError(f"{len(ids)} questions {fault}: {shown}{more}; {advice}")
