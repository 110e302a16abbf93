"""Splits by the hash of a question's id, and the guard against training on what is evaluated.

The split of an id depends on the id, the seed and the shares alone: not on the file it stands in, its order, or how
many questions are read. A data set that brings its own splits (BEIR's qrels, a generated world) keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal

from leret.core.errors import DataError
from leret.core.types import Task

SplitName = Literal["train", "dev", "test"]

_SHOWN = 5


def split_of(id: str, seed: int = 0, dev: float = 0.1, test: float = 0.2) -> SplitName:
    """The split that a question belongs to, for good.

    Args:
        id: the question's id.
        seed: another seed is another split of the same questions.
        dev: share of the questions in ``dev``, in [0, 1].
        test: share of the questions in ``test``, in [0, 1]; what is left is ``train``.

    Raises:
        DataError: the shares are negative or add up to more than 1.

    >>> {split_of(f"q{i}") for i in range(100)} == {"train", "dev", "test"}
    True
    """
    if dev < 0 or test < 0 or dev + test > 1:
        raise DataError(f"splits: dev={dev}, test={test}; give shares from 0 to 1 that add up to 1 at most")
    share = rank_of(id, seed, "split") / 2**64
    if share < test:
        return "test"
    return "dev" if share < test + dev else "train"


def rank_of(id: str, seed: int, purpose: str) -> int:
    """A fixed pseudo-random number of an id, in [0, 2**64).

    Args:
        id: the question's id.
        seed: another seed gives unrelated numbers.
        purpose: keeps uses apart, so that a subset of the first by one is random by another.
    """
    key = f"leret {purpose} {seed}\0{id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


def refuse_leak(training_ids: Iterable[str], evaluation_ids: Iterable[str]) -> None:
    """Refuse to train on questions that are evaluated.

    Args:
        training_ids: ids of the questions that the training data comes from.
        evaluation_ids: ids of the questions of the evaluation split.

    Raises:
        DataError: they have an id in common; the first ones are listed.
    """
    _refuse(
        sorted(set(training_ids) & set(evaluation_ids)),
        "are in the training data and in the evaluation split",
        "sample from split train, and evaluate on dev or test under the same seed",
    )


def refuse_doubles(training: Iterable[Task], evaluation: Iterable[Task]) -> None:
    """Refuse to evaluate on a text that is trained on under another id.

    Raises:
        DataError: questions have a text in common; the first ones of the evaluation are listed.
    """
    texts = {question.text for question in training}
    _refuse(
        [question.id for question in evaluation if question.text in texts],
        "of the evaluation split have the text of one in the training data",
        "remove them from the questions' file",
    )


def _refuse(ids: Sequence[str], what: str, mend: str) -> None:
    if ids:
        shown = ", ".join(repr(id) for id in ids[:_SHOWN])
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        raise DataError(f"{len(ids)} questions {what}: {shown}{more}; {mend}")
