"""Dialogues with personas: ConvAI2's text files, and JSON lines.

A ConvAI2 line starts with its number in the dialogue. Lines of the persona (``1 your persona: i like tea .``) come
before turns (``4 the partner's utterance<TAB>reply``). The partner's persona and candidates after further tabs are
ignored. Each turn is a task. A JSON object has ``persona``, ``history`` (utterances, the partner's last), ``reply``,
and optionally ``stories`` (texts, or objects with ``id``, ``title`` and ``text``), ``id``, ``dialogue`` and ``split``.
A task's inputs are ``persona`` and ``history``; the stories of all records are the corpus, unless `data.corpus` names
another.

The tasks of a dialogue are in one split. Without the field ``dialogue``, tasks with the same persona are in one split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from leret.config.data import FileSettings
from leret.core.types import Document, Task, digest
from leret.datasets.formats.base import HUB, Fields, FileReader, optional_text, text, wrong
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.records import BadRecord, Problems, Record, lines, open_compressed
from leret.datasets.splits import SPLITS, split_of

_SILENCE = "__SILENCE__"  # stands for the partner's utterance if the other speaker begins


class DialogueReader(FileReader):
    """Reads either format; a file is JSON if it begins with a brace or a bracket."""

    def tasks(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        for record, task in super().tasks(data, problems):
            dialogue = str(record.value.get("dialogue") or digest(task.inputs["persona"]))
            yield record, replace(task, split=task.split or split_of(dialogue, data.seed))

    def rows(self, source: str, problems: Problems) -> Iterator[Record]:
        if not source.startswith(HUB):
            with open_compressed(Path(source)) as file:
                if file.peek(1)[:1] not in (b"{", b"["):
                    return _turns(Path(source), problems)
        return super().rows(source, problems)


def _turns(path: Path, problems: Problems) -> Iterator[Record]:
    """Yield each turn of a ConvAI2 file as a record with the fields of the JSON format."""
    persona, history, start = list[str](), list[str](), 0
    for number, line in lines(path, problems):
        with problems.at(f"{path}:{number}"):
            head, _, rest = line.partition(" ")
            if not head.isdigit() or not rest:
                fault = f"{line[:60]!r} is not a ConvAI2 line; each line is a number, a space and a text"
                raise BadRecord("broken line", fault)
            if head == "1":
                persona, history, start = [], [], number
            who, mark, fact = rest.partition(" persona: ")
            if mark and who in {"your", "partner's"}:
                persona += [fact.strip()] if who == "your" else []
                continue
            said, _, reply = rest.partition("\t")
            reply = reply.partition("\t")[0].strip()
            if not reply:
                fault = f"{line[:60]!r} has no reply; a turn is an utterance, a tab and a reply"
                raise BadRecord("broken line", fault)
            history += [said.strip()] if said.strip() not in {"", _SILENCE} else []
            value = {"id": f"{path.name.partition('.')[0]}-{number}", "persona": persona, "history": [*history]}
            answered = {"reply": reply, "dialogue": None if persona else str(start)}
            yield Record(f"{path}:{number}", number, {**value, **answered})
            history.append(reply)


def _task(record: Fields) -> Task:
    inputs = {name: _texts(record, name) for name in ("persona", "history")}
    split = optional_text(record, "split")
    if split is not None and split not in SPLITS:
        raise BadRecord("unknown split", f"field 'split' is {split!r}; it should be train, dev or test")
    reply = text(record, "reply")
    name = text(record, "id") if record.get("id") is not None else digest(inputs, reply)
    return Task(name, inputs, answers=(reply,), split=SPLITS[split] if split else None)


def _texts(record: Fields, name: str) -> list[Any]:
    """Return a field that holds texts, in order and with repetitions."""
    value = record.get(name)
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item.strip() for item in items):
        raise wrong(name, value, "a list of non-empty strings")
    return [item.strip() for item in items]


def _stories(record: Fields) -> Iterable[Document]:
    stories = record.get("stories") or []
    if not isinstance(stories, list) or not all(isinstance(one, str | dict) for one in stories):
        raise wrong("stories", stories, "a list of texts, or of objects with id, title and text")
    for one in stories:
        story = {"text": one} if isinstance(one, str) else one
        body = text(story, "text")
        name = text(story, "id") if story.get("id") is not None else digest(body)
        yield Document(name, optional_text(story, "title") or "", body)


DIALOGUE = DialogueReader(
    _task, _stories, ("persona",), brings_documents=True, repeats_documents=True, alternative=JSONL
)
