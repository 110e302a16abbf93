"""Find the turns that belong to one conversation, also if a file holds it from both sides.

ConvAI2's files hold each conversation twice: once from each speaker's side, with the personas
exchanged. If the two sides were in different splits, test replies would be in training prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from leret.core.types import Task, digest
from leret.datasets.leaks import utterances
from leret.datasets.records import BadRecord

LENGTH = 3
"""Number of successive utterances that identify a conversation."""
_LONG = 10  # words, from which a dialogue's first two utterances are more than greetings


class Turn(NamedTuple):
    """A task of a dialogue, and what shows which dialogue it is."""

    task: Task  # with the inputs ``persona`` and ``history``, and the reply as its answer
    name: str  # the data set's name of the dialogue, or a digest of the persona
    persona: Hashable  # value that turns with the same persona share, in any order of its sentences
    keys: Sequence[Hashable] = ()  # values that only turns of the same conversation share


def numbered(line: str, form: str) -> tuple[str, str]:
    """Split a line that begins with its number in a dialogue or story, as in ``4 hi there``.

    BadRecord, with the name of the file's format (``form``), if the number or the text is missing.
    """
    number, _, text = line.partition(" ")
    if not number.isdigit() or not text:
        fault = f"{line[:60]!r} is not a {form} line; each line is a number, a space and a text"
        raise BadRecord("broken line", fault)
    return number, text


def windows(texts: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield successive utterances that identify a conversation.

    Yield with each whether the speaker of the last text ends them.
    """
    for end in range(2, len(texts) + 1):
        start = max(end - LENGTH, 0)
        window = "\n".join(texts[start:end])
        if end >= LENGTH or len(window.split()) >= _LONG:
            n_later = len(texts) - end
            yield window, n_later % 2 == 0


def split_names(turns: Sequence[Turn]) -> list[str]:
    """Return a name for each turn; turns with the same name must be in one split.

    The turns of a conversation have the same name, from both sides. So have turns with the same
    persona, unless this would join more than half of the personas, as in ConvAI2, where each
    persona takes part in many conversations.
    """
    keys = _keys(turns)
    pairs = zip(keys, turns, strict=True)
    with_personas = [[*turn_keys, turn.persona] for turn_keys, turn in pairs]
    old_names = [turn.name for turn in turns]
    names = _joined(old_names, with_personas)
    renamings = set(zip(names, old_names, strict=True))
    n_joined = Counter(name for name, _ in renamings)
    if max(n_joined.values(), default=0) <= max(2, n_joined.total() / 2):
        return names
    digests = [digest(turn.task.inputs) for turn in turns]
    return _joined(digests, keys)


def _keys(turns: Sequence[Turn]) -> list[list[Hashable]]:
    """Return the keys of each turn, with the windows that occur from both sides.

    A history may hold only the partner's utterances, as in LAPDOG's files, so neighbouring turns
    are joined, too.
    """
    texts = [utterances(turn.task) for turn in turns]
    between: list[set[tuple[str, bool]]] = []
    for (first, before), (second, said) in pairwise(zip(turns, texts, strict=True)):
        joined: list[str] = []
        if first.persona == second.persona:
            joined = [*before[-2:], *said[-2:]]
        between.append(set(windows(joined)))
    # strict=False: longer than `texts` if there are no turns
    with_neighbours = zip(texts, [(), *between], [*between, ()], strict=False)
    views = [{*windows(said), *before, *after} for said, before, after in with_neighbours]
    seen = set[tuple[str, bool]]().union(*views)
    keys: list[list[Hashable]] = []
    for turn, view in zip(turns, views, strict=True):
        turn_keys = [*turn.keys]
        for window, speaks in view:
            if (window, not speaks) in seen:
                turn_keys.append(window)
        keys.append(turn_keys)
    return keys


def _joined(names: list[str], keys: Sequence[Sequence[Hashable]]) -> list[str]:
    """Give turns with a key in common the least of their names, until no name changes."""
    while True:
        least: dict[Hashable, str] = {}
        for name, turn_keys in zip(names, keys, strict=True):
            for key in turn_keys:
                least[key] = min(name, least.get(key, name))
        new_names = []
        for name, turn_keys in zip(names, keys, strict=True):
            candidates = [name, *(least[key] for key in turn_keys)]
            new_names.append(min(candidates))
        if new_names == names:
            return names
        names = new_names
