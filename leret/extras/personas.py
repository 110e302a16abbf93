"""A generated persona world: dialogues with a person, and stories about the persona's facts.

A persona is five sentences. Each names a film, a novel, a company, a teacher or a mother, and one
story tells more about it. A partner asks about one fact per turn, and the reply needs the story of
this fact. Searching for the persona finds the stories of all five facts and, for some personas, a
gazette that names two of the facts but answers no question, so a picker has to choose. A task's
gold document is the right story; it is only for checking, and the example recipes do not train on
it. No name occurs in two splits. All words are in the vocabulary of policy `demo`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from leret.core import yaml
from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.world.cast import CITIES, LISTS, Names
from leret.datasets.world.generate import WorldReader

_GAZETTES = 0.3  # share of personas with a gazette
_MOST = 600  # dialogues; the lexicon has no more names of companies


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact of a persona, its story, and the question that the story answers."""

    name: str  # of the film, novel, company, teacher or mother
    line: str  # sentence of the persona
    questions: tuple[str, ...]
    story: str
    reply: str


_FILE = resources.files("leret.extras") / "facts.yaml"
_FACTS = yaml.load(_FILE.read_text(encoding="utf-8"))
_LISTS: dict[str, Sequence[Any]] = {**LISTS, "YEARS": range(1930, 2000)}


def _fact(rng: random.Random, names: Names, kind: Mapping[str, Any]) -> Fact:
    values = {word: getattr(names, of)() for word, of in kind["names"].items()}
    for word, of in kind["draws"].items():
        choices = _LISTS[of] if isinstance(of, str) else of
        values[word] = rng.choice(choices)
    return Fact(
        name=values["name"],
        line=kind["line"].format_map(values),
        questions=tuple(kind["questions"]),
        story=kind["story"].format_map(values),
        reply=kind["reply"].format_map(values),
    )


def generate_personas(
    seed: int, n_train: int = 240, n_dev: int = 40, n_test: int = 160, turns: int = 3
) -> tuple[tuple[Document, ...], tuple[Task, ...]]:
    """Return stories sorted by id, and a task for each turn of the dialogues in each split.

    A task's inputs are ``persona`` (five sentences) and ``history`` (utterances, the partner's
    last); its answer is the reply. ``turns`` is the number of turns per dialogue, from 1 to 5.
    """
    sizes = {"train": n_train, "dev": n_dev, "test": n_test}
    if min(sizes.values()) < 0 or not 0 < sum(sizes.values()) <= _MOST:
        raise DataError(
            f"personas: {sizes} dialogues; set 1 to {_MOST} in total "
            "(the lexicon has no more names)"
        )
    if turns not in range(1, len(_FACTS) + 1):
        raise DataError(f"personas: turns is {turns}; set a whole number from 1 to {len(_FACTS)}")
    rng = random.Random(f"leret personas {seed}")
    names = Names(rng, 20_000)
    documents: list[Document] = []
    tasks: list[Task] = []
    for split, n in sizes.items():
        for number in range(n):
            kinds = rng.sample(_FACTS, len(_FACTS))
            persona = [_fact(rng, names, kind) for kind in kinds]
            stories = [Document(names.doc_id(), fact.name, fact.story) for fact in persona]
            documents += stories
            if rng.random() < _GAZETTES:
                documents.append(_gazette(rng, names, persona))
            lines = [fact.line for fact in persona]
            history: list[str] = []
            for i in rng.sample(range(len(persona)), turns):
                fact = persona[i]
                id = f"p{seed}-{split}-{number:04d}-{len(history) // 2}"
                question = rng.choice(fact.questions)
                history.append(question)
                inputs = {"persona": lines, "history": [*history]}
                gold = (stories[i].doc_id,)
                task = Task(id, inputs, gold, (fact.reply,), split=split)
                tasks.append(task)
                history.append(fact.reply)
    documents.sort(key=lambda document: document.doc_id)
    return tuple(documents), tuple(tasks)


def _gazette(rng: random.Random, names: Names, persona: list[Fact]) -> Document:
    first, second = rng.sample(persona, 2)
    city = rng.choice(CITIES)
    text = f"The gazette of {city} is about {first.name} and {second.name}."
    return Document(names.doc_id(), f"{city} Gazette", text)


PERSONAS = WorldReader(generate_personas)
