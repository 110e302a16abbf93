"""Several picks ahead: the best sequences of picks by the sum of their Q-values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from leret.core.types import STOP, Candidate, Choice


@dataclass(frozen=True, slots=True)
class Path:
    """Picks in their order, each with its Q-value."""

    picked: tuple[Candidate, ...] = ()
    q_values: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """The mean of its Q-values: paths that stopped earlier compare with others."""
        return sum(self.q_values) / max(1, len(self.q_values))

    @property
    def stopped(self) -> bool:
        """Whether its last pick is to stop."""
        return bool(self.picked) and self.picked[-1] == STOP


def plan(score: Callable[[Sequence[Choice]], list[Tensor]], choice: Choice, n_picks: int, width: int) -> list[Path]:
    """Beam search over the picks that follow a choice, best path first; width 1 is the greedy order.

    A step scores all paths in one batch; candidates are embedded once, at the first. Of paths that picked the same
    candidates the best one stays.

    Args:
        score: values of each candidate of some choices.
        choice: the next one.
        n_picks: picks to come, at least one.
        width: paths that are followed.
    """
    paths = [Path()]
    for _ in range(max(1, min(n_picks, len(choice.candidates)))):
        grown = [path for path in paths if path.stopped]
        going = [path for path in paths if not path.stopped]
        choices = [_after(choice, path.picked) for path in going]
        for path, after, values in zip(going, choices, score(choices), strict=True):
            best, places = values.sort(descending=True, stable=True)
            for value, i in zip(best[:width].tolist(), places[:width].tolist(), strict=True):
                grown.append(Path((*path.picked, after.candidates[i]), (*path.q_values, value)))
        distinct: dict[frozenset[str], Path] = {}
        for path in sorted(grown, key=lambda path: -path.value):
            distinct.setdefault(frozenset(one.id for one in path.picked), path)
        paths = list(distinct.values())[:width]
    return paths


def _after(choice: Choice, picked: tuple[Candidate, ...]) -> Choice:
    gone = {one.id for one in picked}
    left = [one for one in choice.candidates if one.id not in gone] if picked else choice.candidates
    return replace(choice, candidates=left, picked=(*choice.picked, *picked))
