"""Dialogues with personas: ConvAI2's text files, JSON lines, and LAPDOG's JSON lines.

A ConvAI2 line starts with its number in the dialogue. Lines of the persona (``1 your persona: i
like tea .``) come before turns (``4 the partner's utterance<TAB>reply``). The partner's persona and
candidates after further tabs are not inputs. Each turn is a task. A JSON object has ``persona``,
``history`` (utterances, the partner's last), ``reply``, and optionally ``stories`` (texts, or
objects with ``id``, ``title`` and ``text``), ``id``, ``dialogue`` and ``split``.

LAPDOG's objects (arXiv 2406.18847) have the three in a text, ``{"question": "persona: i like tea. i
have a dog. context: Q: hi R: hello Q: who are you?", "answers": ["..."]}``. The labels ``Q:`` and
``R:`` only separate utterances: LAPDOG's own files keep the partner's last three, so every second
context begins or ends with ``R:``.

A task's inputs are ``persona`` and ``history``; the stories of all records are the corpus, unless
`data.corpus` names another, with leret's JSON lines.

The tasks of a conversation are in one split, also if the file holds it from both sides
(`conversations`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import eq
from pathlib import Path
from typing import Any

from leret.config.data import FileSettings
from leret.core.types import Document, Task, digest
from leret.datasets.formats.base import (
    HUB,
    Fields,
    FileReader,
    optional_text,
    split,
    text,
    text_list,
    wrong,
)
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.leaks import plain
from leret.datasets.records import BadRecord, Problems, Record, lines, open_compressed
from leret.datasets.splits import split_of
from leret.extras.conversations import Turn, numbered, split_names

_SILENCE = "__SILENCE__"  # stands for the partner's utterance if the other speaker begins
_NOT_DOCUMENT = frozenset({"persona", "history", "reply", "question", "stories"})
"""Fields of dialogues, which a document does not have."""

_QUESTION = re.compile(
    r"\s*(?:persona:(.*?))?\bcontext:\s*((?:[QR]:.*)?)", re.DOTALL | re.IGNORECASE
)
_SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\b(?:dr|mr|ms|st)\.)(?<!\bmrs\.)\s+|\s*\n\s*", re.IGNORECASE
)


class DialogueReader(FileReader):
    """Reads all three formats; a file is JSON if it begins with a brace or a bracket."""

    def fits(self, record: Fields) -> bool:
        question = str(record.get("question"))
        return super().fits(record) or _QUESTION.fullmatch(question) is not None

    def tasks(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        pairs = list(super().tasks(data, problems))
        names = split_names([_turn(record, task) for record, task in pairs])
        for (record, task), name in zip(pairs, names, strict=True):
            yield record, replace(task, split=task.split or split_of(name, data.seed))

    def rows(self, source: str, problems: Problems) -> Iterator[Record]:
        if not source.startswith(HUB) and _is_convai2(Path(source)):
            return _turns(Path(source), problems)
        return super().rows(source, problems)


def _is_convai2(path: Path) -> bool:
    with open_compressed(path) as file:
        start = file.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    is_table = not {".csv", ".tsv"}.isdisjoint(path.suffixes)
    return not is_table and not start.startswith((b"{", b"[", b"PAR1"))


@dataclass(frozen=True, slots=True)
class _Line(Record):
    """A turn of a ConvAI2 file."""

    start: int = 0  # first line of the dialogue


def _turn(record: Record, task: Task) -> Turn:
    label = record.value.get("dialogue")
    if label not in (None, ""):
        name = str(label)
        return Turn(task, name, ("dialogue", name))
    persona = task.inputs["persona"]
    name = digest(persona or task.inputs)
    sentences = frozenset(map(plain, persona))
    keys = [record.start] if isinstance(record, _Line) else []
    return Turn(task, name, sentences or name, keys)


def _turns(path: Path, problems: Problems) -> Iterator[Record]:
    """Yield each turn of a ConvAI2 file as a record with the fields of the JSON format."""
    persona: list[str] = []
    history: list[str] = []
    start = 0
    name = path.name.partition(".")[0]
    for number, line in lines(path, problems):
        place = f"{path}:{number}"
        with problems.at(place):
            head, rest = numbered(line, "ConvAI2")
            if head == "1":
                persona = []
                history = []
                start = number
            who, mark, sentence = rest.partition(" persona: ")
            if mark and who in {"your", "partner's"}:
                if who == "your":
                    persona.append(sentence.strip())
                continue
            said, reply, *_ = map(str.strip, [*rest.split("\t"), ""])
            if not reply:
                fault = f"{line[:60]!r} has no reply; a turn is an utterance, a tab and a reply"
                raise BadRecord("broken line", fault)
            if said not in {"", _SILENCE}:
                history.append(said)
            value = {
                "id": f"{name}-{number}",
                "persona": persona,
                "history": [*history],
                "reply": reply,
                "dialogue": None if persona else str(start),
            }
            yield _Line(place, number, value, start=start)
            history.append(reply)


def _task(record: Fields) -> Task:
    if "question" in record and "history" not in record:
        inputs, replies = _parted(record)
    else:
        inputs = {name: _texts(record, name) for name in ("persona", "history")}
        replies = (text(record, "reply"),)
    has_id = record.get("id") is not None
    id = text(record, "id") if has_id else digest(inputs, *replies)
    return Task(id, inputs, answers=replies, split=split(record))


def _parted(record: Fields) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Return the inputs and the replies of a record in LAPDOG's format."""
    question = text(record, "question")
    parts = _QUESTION.fullmatch(question)
    if parts is None:
        advice = "it should be 'persona: SENTENCES context: Q: UTTERANCE R: UTTERANCE Q: UTTERANCE'"
        raise BadRecord("broken dialogue", f"field 'question' is {question[:60]!r}; {advice}")
    persona = (parts[1] or "").strip()
    sentences = [sentence for sentence in _SENTENCE_END.split(persona) if sentence]
    replies = text_list(record, "answers")
    if not replies:
        raise BadRecord(
            "empty field", 'field \'answers\' has no reply; add it, as in "answers": ["i am fine"]'
        )
    inputs = {"persona": sentences, "history": _utterances(parts[2])}
    return inputs, tuple(map(str.strip, replies))


def _utterances(context: str) -> list[str]:
    """Part a context at its labels.

    ``q:`` is no label in a context that begins with ``Q:``, or the reverse.
    """
    if not context:
        return []
    labels = "qr" if context[0].islower() else "QR"
    _, *parts = re.split(rf"(?<!\S)([{labels}]):", context)
    said = [utterance.strip() for utterance in parts[1::2]]
    if "" in said[1:] or any(map(eq, parts[::2], parts[2::2])):
        fault = f"Q: and R: do not alternate in {context[:60]!r}, or one has no utterance"
        raise BadRecord("broken dialogue", fault)
    return [utterance for utterance in said if utterance not in {"", _SILENCE}]


def _texts(record: Fields, name: str) -> list[Any]:
    """Return a field that holds texts, in order and with repetitions."""
    value = record.get(name)
    items = [value] if isinstance(value, str) else value
    expected = "a list of non-empty strings"
    if not isinstance(items, list):
        raise wrong(name, value, expected)
    texts = []
    for item in items:
        if not isinstance(item, str) or not item.strip():
            raise wrong(name, value, expected)
        texts.append(item.strip())
    return texts


def _stories(record: Fields) -> Iterable[Document]:
    if "text" in record or _NOT_DOCUMENT.isdisjoint(record):
        yield from JSONL.in_record(record)
        return
    stories = record.get("stories") or []
    if not isinstance(stories, list) or not all(isinstance(item, str | dict) for item in stories):
        raise wrong("stories", stories, "a list of texts, or of objects with id, title and text")
    for item in stories:
        story = {"text": item} if isinstance(item, str) else item
        body = text(story, "text")
        has_id = story.get("id") is not None
        id = text(story, "id") if has_id else digest(body)
        title = optional_text(story, "title") or ""
        yield Document(id, title, body)


DIALOGUE = DialogueReader(
    _task, _stories, ("persona",), brings_documents=True, repeats_documents=True, alternative=JSONL
)
