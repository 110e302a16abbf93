"""Several picks ahead: the best sequences of picks by their Q-values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from leret.core.types import STOP, Candidate, Choice


class Picks(NamedTuple):
    """Picks in their order, each with its Q-value."""

    picked: tuple[Candidate, ...] = ()
    q_values: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """The mean of the Q-values, so that those that stopped earlier compare with others."""
        return sum(self.q_values) / max(1, len(self.q_values))


def plan(score: Callable[[Sequence[Choice]], list[Tensor]], choice: Choice, n_picks: int, width: int) -> list[Picks]:
    """Beam search over the picks that follow a choice, best first; width 1 is the greedy order.

    A step scores all sequences in one batch. Of those that picked the same candidates the best one stays.

    Args:
        score: values of each candidate of some choices.
        choice: the next one.
        n_picks: to come, at least one.
        width: sequences that are followed.
    """
    found = [Picks()]
    for _ in range(max(1, min(n_picks, len(choice.candidates)))):
        grown = [one for one in found if one.picked[-1:] == (STOP,)]
        going = [one for one in found if one.picked[-1:] != (STOP,)]
        choices = [_after(choice, one.picked) for one in going]
        for before, after, values in zip(going, choices, score(choices), strict=True):
            best, places = (part[:width].tolist() for part in values.sort(descending=True, stable=True))
            for value, i in zip(best, places, strict=True):
                grown.append(Picks((*before.picked, after.candidates[i]), (*before.q_values, value)))
        grown.sort(key=lambda one: one.value)
        found = list({frozenset(pick.id for pick in one.picked): one for one in grown}.values())
        found = sorted(found, key=lambda one: -one.value)[:width]
    return found


def _after(choice: Choice, picked: tuple[Candidate, ...]) -> Choice:
    gone = {one.id for one in picked}
    left = [one for one in choice.candidates if one.id not in gone] if picked else choice.candidates
    return replace(choice, candidates=left, picked=(*choice.picked, *picked))
