"""Find the turns that belong to one conversation, also if a file holds the conversation from both sides.

ConvAI2's files hold each conversation twice: once from each speaker's side, with the personas exchanged. If the two
sides were in different splits, test replies would be in training prompts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from leret.core.types import Task, digest

WINDOW = 3
"""Number of successive utterances that identify a conversation, because two may be only greetings."""


class Window(NamedTuple):
    """Successive utterances of a dialogue, as one of its two sides sees them."""

    texts: tuple[str, ...]
    ends_with_speaker: bool  # the speaker who replies, not the partner, says the last utterance


@dataclass(frozen=True, slots=True)
class Turn:
    """A task with the dialogue that it comes from."""

    task: Task  # with the inputs ``persona`` and ``history``, and the reply as its answer
    dialogue: str | None = None  # the data set's name of the dialogue
    block: int | None = None  # first line of the dialogue, in a file that shows where a dialogue begins
    partner: tuple[str, ...] = ()  # the partner's persona

    @property
    def persona(self) -> tuple[str, ...]:
        """The speaker's persona in a fixed order."""
        return _in_order(self.task.inputs["persona"])


@lru_cache(1 << 16)
def plain(text: str) -> str:
    """Return the words of a text, without regard to case, punctuation, spaces and accents."""
    folded = unicodedata.normalize("NFKD", text).casefold().replace("'", "").replace("’", "")
    return " ".join(re.findall(r"\w+", "".join(char for char in folded if not unicodedata.combining(char))))


def utterances(task: Task) -> list[str]:
    """Return the history and the reply of a dialogue's task, with `plain`; an empty list for other tasks."""
    history = task.inputs.get("history")
    if not isinstance(history, list) or not all(isinstance(item, str) for item in history):
        return []
    return [plain(text) for text in (*history, *task.answers[:1])]


def windows(texts: Sequence[str]) -> Iterator[Window]:
    """Yield each run of `WINDOW` utterances that are not all equal. The last of ``texts`` is a reply."""
    for end in range(WINDOW, len(texts) + 1):
        window = tuple(texts[end - WINDOW : end])
        if len(set(window)) > 1:
            yield Window(window, (len(texts) - end) % 2 == 0)


def split_names(turns: Sequence[Turn]) -> list[str]:
    """Return a name for each turn; turns with the same name must be in one split.

    The turns of a conversation have the same name, from both sides. So have dialogues with the same persona, unless
    this would join more than half of the personas, as in ConvAI2, where each persona takes part in many conversations.
    """
    dialogues: list[list[Turn]] = []
    for turn in turns:
        if dialogues and _continues(dialogues[-1][-1], turn):
            dialogues[-1].append(turn)
        else:
            dialogues.append([turn])
    conversations = _conversation_keys(dialogues)
    personas = [_persona_key(dialogue) for dialogue in dialogues]
    groups = _groups([*keys, *persona] for keys, persona in zip(conversations, personas, strict=True))
    by_persona = not _joins_too_many(groups, personas)
    if not by_persona:
        groups = _groups(conversations)
    names: dict[int, str] = {}
    for group, dialogue in zip(groups, dialogues, strict=True):
        name = _name(dialogue, by_persona)
        names[group] = min(name, names.get(group, name))
    return [names[group] for group, dialogue in zip(groups, dialogues, strict=True) for _ in dialogue]


def _continues(before: Turn, turn: Turn) -> bool:
    """Return True if a turn follows the one before it in the file in the same dialogue."""
    if (before.dialogue, before.block, before.persona) != (turn.dialogue, turn.block, turn.persona):
        return False
    if turn.dialogue is not None or turn.block is not None:
        return True
    said, history = before.task.inputs["history"], turn.task.inputs["history"]
    if not said:
        return len(history) > 0
    return said[-1] in history[:-1]


def _conversation_keys(dialogues: Sequence[Sequence[Turn]]) -> list[list[Hashable]]:
    """Return values for each dialogue that are equal for both sides of a conversation."""
    views = [_windows_of(dialogue) for dialogue in dialogues]
    seen = {window for view in views for window in view}
    short = {next(iter(view)).texts for view in views if len(view) == 1}
    keys: list[list[Hashable]] = []
    for dialogue, view in zip(dialogues, views, strict=True):
        of_dialogue: list[Hashable] = []
        for window in view:
            from_other_side = Window(window.texts, not window.ends_with_speaker)
            if from_other_side in seen and (len(window.texts) == WINDOW or window.texts in short):
                of_dialogue.append(window.texts)
        first = dialogue[0]
        if first.dialogue is not None:
            of_dialogue.append(first.dialogue)
        if first.persona and first.partner:
            of_dialogue.append(frozenset([first.persona, _in_order(first.partner)]))
        keys.append(of_dialogue)
    return keys


def _windows_of(dialogue: Sequence[Turn]) -> set[Window]:
    """Return the windows of a dialogue: of its turns in order, and of the history and reply of each turn.

    Neither is enough: turns may be missing, and a history may be cut, or hold only the partner's utterances. The first
    two utterances are a window too; they identify a conversation only if one side has no others.
    """
    in_order: list[str] = []
    of_dialogue: set[Window] = set()
    for turn in dialogue:
        texts = utterances(turn.task)
        in_order += texts[-2:]
        of_dialogue.update(windows(texts))
    of_dialogue.update(windows(in_order))
    if len(in_order) > 1:
        of_dialogue.add(Window(tuple(in_order[:2]), len(in_order) % 2 == 0))
    return of_dialogue


def _persona_key(dialogue: Sequence[Turn]) -> list[Hashable]:
    """Return the persona of a dialogue as a key; an empty list if it does not decide the split."""
    first = dialogue[0]
    if first.dialogue is not None or not first.persona:
        return []
    return [("persona", first.persona)]


def _joins_too_many(groups: Sequence[int], personas: Sequence[Sequence[Hashable]]) -> bool:
    by_group: dict[int, set[Hashable]] = {}
    for group, persona in zip(groups, personas, strict=True):
        by_group.setdefault(group, set()).update(persona)
    n_all = len(set().union(*by_group.values()))
    return any(len(joined) > max(2, n_all / 2) for joined in by_group.values())


def _name(dialogue: Sequence[Turn], by_persona: bool) -> str:
    first = dialogue[0]
    if first.dialogue is not None:
        return first.dialogue
    if first.block is not None and not first.persona:
        return str(first.block)
    return digest(first.task.inputs["persona"]) if by_persona else digest(first.task.inputs, first.task.answers)


def _in_order(persona: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(map(plain, persona)))


def _groups(members: Iterable[Iterable[Hashable]]) -> list[int]:
    """Return the first member of each member's group; members with an equal key are in one group."""
    parents: list[int] = []
    owners: dict[Hashable, int] = {}

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    for number, keys in enumerate(members):
        parents.append(number)
        for key in keys:
            first, second = sorted([root(owners.setdefault(key, number)), root(number)])
            parents[second] = first
    return [root(number) for number in range(len(parents))]
