"""A generated persona world: dialogues with a person, and stories that tell more about the facts in the persona.

A persona is five sentences. Each names a film, a novel, a company, a teacher or a mother, and one story tells more
about it. A partner asks about one fact per turn, and the reply needs the story of this fact. Searching for the persona
finds the stories of all five facts and, for some personas, a gazette that names two of the facts but answers no
question, so a picker has to choose. A task's gold document is the right story; it is only for checking, and the example
recipes do not train on it. No name occurs in two splits. All words are in the vocabulary of policy `demo`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.world.cast import AWARDS, CITIES, INSTRUMENTS, Names

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


def _film(rng: random.Random, names: Names) -> Fact:
    name, other = names.work(), names.person()
    return Fact(
        name,
        f"I directed the film {name}.",
        ("By whom was your film scored?", "Who was the composer of the film that you directed?"),
        f"{name} is a {rng.choice(('drama', 'crime'))} film from {_year(rng)}. The film was scored by {other}.",
        f"My film was scored by {other}.",
    )


def _novel(rng: random.Random, names: Names) -> Fact:
    name, other = names.work(), names.person()
    return Fact(
        name,
        f"I penned the novel {name}.",
        ("Who illustrated your novel?", "By whom was the novel that you penned illustrated?"),
        f"{name} is a {rng.choice(('gothic', 'spy'))} novel from {_year(rng)}. The novel was illustrated by {other}.",
        f"The illustrator of my novel is {other}.",
    )


def _company(rng: random.Random, names: Names) -> Fact:
    name, city, year = names.company(), rng.choice(CITIES), _year(rng)
    return Fact(
        name,
        f"I work for the company {name}.",
        ("In which city is the company that you work for?", "Where and when was your company founded?"),
        f"{name} is a {rng.choice(('media', 'trading', 'family'))} company, founded in {city} in {year}.",
        f"The company was founded in {city} in {year}.",
    )


def _teacher(rng: random.Random, names: Names) -> Fact:
    name, prize = names.person(), f"{rng.choice(AWARDS)} {rng.choice(('Medal', 'Prize'))}"
    year = _year(rng)
    return Fact(
        name,
        f"My teacher was {name}.",
        ("Which award did your teacher win?", "Did your teacher win a prize?"),
        f"{name} was a teacher at {rng.choice(CITIES)} University, and has won the {prize} in {year}.",
        f"My teacher won the {prize} in {year}.",
    )


def _mother(rng: random.Random, names: Names) -> Fact:
    name, instrument, city = names.person(), rng.choice(INSTRUMENTS), rng.choice(CITIES)
    return Fact(
        name,
        f"My mother is {name}.",
        ("Which instrument has your mother played?", "Is your mother a musician?"),
        f"{name} is a musician born in {_year(rng)}, known as she played the {instrument} in {city}.",
        f"My mother played the {instrument} in {city}.",
    )


_FACTS: tuple[Callable[[random.Random, Names], Fact], ...] = (_film, _novel, _company, _teacher, _mother)


def _year(rng: random.Random) -> int:
    return rng.randint(1930, 1999)


def generate_personas(
    seed: int, n_train: int = 240, n_dev: int = 40, n_test: int = 160, turns: int = 3
) -> tuple[tuple[Document, ...], tuple[Task, ...]]:
    """Return stories sorted by id, and a task for each turn of the dialogues in each split.

    A task's inputs are ``persona`` (five sentences) and ``history`` (utterances, the partner's last); its answer is the
    reply. ``turns`` is the number of turns per dialogue, from 1 to 5.
    """
    sizes = {"train": n_train, "dev": n_dev, "test": n_test}
    if min(sizes.values()) < 0 or not 0 < sum(sizes.values()) <= _MOST:
        raise DataError(f"personas: {sizes} dialogues; set 1 to {_MOST} in total (the lexicon has no more names)")
    if turns not in range(1, len(_FACTS) + 1):
        raise DataError(f"personas: turns is {turns}; set a whole number from 1 to {len(_FACTS)}")
    rng = random.Random(f"leret personas {seed}")
    names, documents, tasks = Names(rng, 20_000), list[Document](), list[Task]()
    for split, n in sizes.items():
        for number in range(n):
            facts = [make(rng, names) for make in rng.sample(_FACTS, len(_FACTS))]
            stories = [Document(names.doc_id(), fact.name, fact.story) for fact in facts]
            documents += [*stories, *([_gazette(rng, names, facts)] if rng.random() < _GAZETTES else [])]
            asked = rng.sample(range(len(facts)), turns)
            persona, history = [fact.line for fact in facts], list[str]()
            for place in asked:
                history.append(rng.choice(facts[place].questions))
                inputs = {"persona": persona, "history": [*history]}
                name, gold = f"p{seed}-{split}-{number:04d}-{len(history) // 2}", (stories[place].doc_id,)
                tasks.append(Task(name, inputs, gold, (facts[place].reply,), split=split))
                history.append(facts[place].reply)
    return tuple(sorted(documents, key=lambda document: document.doc_id)), tuple(tasks)


def _gazette(rng: random.Random, names: Names, facts: list[Fact]) -> Document:
    one, other = rng.sample(facts, 2)
    city = rng.choice(CITIES)
    return Document(names.doc_id(), f"{city} Gazette", f"The gazette of {city} is about {one.name} and {other.name}.")
