"""Split tasks by hash of their ids.

A split depends only on the id and the seed, not on the file, the order, or the number of tasks.
Data sets with splits (BEIR's qrels, a generated world) keep their splits.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

SplitName = Literal["train", "dev", "test"]
SPLITS: dict[str, SplitName] = {
    "train": "train",
    "training": "train",
    "dev": "dev",
    "val": "dev",
    "valid": "dev",
    "validation": "dev",
    "test": "test",
}
"""leret's name for each split name that data sets use."""
_DEV = 0.1
_TEST = 0.2


def split_of(id: str, seed: int = 0) -> SplitName:
    """Return the split of an id: ``test`` for 20% of ids, ``dev`` for 10%, else ``train``.

    >>> {split_of(f"q{i}") for i in range(100)} == {"train", "dev", "test"}
    True
    """
    share = rank_of(id, seed, "split") / 2**64
    if share < _TEST:
        return "test"
    if share < _TEST + _DEV:
        return "dev"
    return "train"


def rank_of(id: str, seed: int, purpose: str) -> int:
    """Return a pseudo-random number in [0, 2**64), by the id, the seed and the purpose."""
    key = f"leret {purpose} {seed}\0{id}".encode("utf-8", "surrogatepass")
    hash_of_key = blake2b(key, digest_size=8).digest()
    return int.from_bytes(hash_of_key, "big")
