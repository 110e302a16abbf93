"""Rows that teach nothing but copying: random word pieces, and spans of them to be said again.

Copying is learned fastest where nothing else is to be learned, and random pieces leave no other way: a neighbour in
meaning, which an encoder's embedding would offer, is simply wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from leret.demo.pretrain.batch import Row

_SPANS = 6


def copying(rng: random.Random, pieces: Sequence[int], around: tuple[Sequence[int], Sequence[int]], end: int) -> Row:
    """One exercise: a prompt of random pieces, and targets that are runs of it.

    Args:
        rng: the only source of chance.
        pieces: token ids to draw from.
        around: token ids of a prompt before and after its text.
        end: the end token.
    """
    said = rng.choices(pieces, k=rng.randint(6, 40))
    before, after = around
    targets = set()
    for _ in range(_SPANS):
        length = rng.randint(2, min(14, len(said)))
        start = rng.randint(0, len(said) - length)
        targets.add((*said[start : start + length], end))
    return Row((*before, *said, *after), tuple(sorted(targets)))


def interleaved(
    rows: Iterator[Row], exercises: Iterator[Row], shares: tuple[float, float], settled: int, rng: random.Random
) -> Iterator[Row]:
    """Rows with exercises between them.

    Args:
        rows: endless, or not.
        exercises: endless.
        shares: of exercises among all rows at the start and after ``settled`` rows, linear in between; below 1.
        settled: rows.
        rng: the only source of chance.
    """
    n = 0
    for row in rows:
        start, last = shares
        while rng.random() < last + (start - last) * max(0.0, 1 - n / max(1, settled)):
            yield next(exercises)
            n += 1
        yield row
        n += 1
