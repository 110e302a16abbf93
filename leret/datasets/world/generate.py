"""A generated world: a corpus of short documents about invented people, works and companies, with questions.

`leret demo` uses this world because it needs no download, no model knows its names, and its questions need search. A
bridge question names a work and asks about one of its makers, so the first document is needed to search for the second.
A comparison question names both entities. Some documents are traps for lexical search: works share a name, people share
a first or last name, and surveys, festivals and gazettes contain the questions' words or names but no answers. Each
person, work and company occurs in the questions of only one split.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from leret.config.data import GeneratedSettings
from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.records import Problems, Reader, Record
from leret.datasets.world import cast as lexicon
from leret.datasets.world.cast import KINDS, Cast, Company, Kind, Names, Person, Work, make_cast

_SURVEYS_A_KIND = 30
_FESTIVALS = 120
_TALKS = 120


def generate(
    seed: int,
    n_train: int = 600,
    n_dev: int = 150,
    n_test: int = 550,
    comparison: float = 0.25,
    three_hop: float = 0.0,
) -> tuple[tuple[Document, ...], tuple[Task, ...]]:
    """Return documents sorted by id, and train, dev and test questions with their gold documents in hop order.

    ``comparison`` is the share of questions that compare two named entities. ``three_hop`` is the share of bridge
    questions with a third document, a university; universities are shared by all splits. Shares are in [0, 1].
    """
    for name, share in (("comparison", comparison), ("three_hop", three_hop)):
        if not 0 <= share <= 1:
            raise DataError(f"world: {name} is {share}; set a share from 0 to 1")
    sizes = {"train": n_train, "dev": n_dev, "test": n_test}
    if min(sizes.values()) < 0 or not 0 < sum(sizes.values()) <= 2000:
        raise DataError(
            f"world: {sizes} questions; set 1 to 2000 in total (the lexicon has no more names)"
        )
    rng = random.Random(f"leret world {seed}")
    names = Names(rng, 20_000)
    casts = {
        split: make_cast(rng, names, n + 8, n // 5 + 4, n + 24) for split, n in sizes.items() if n
    }
    universities = {f"{city} University": _university(rng, names, city) for city in lexicon.CITIES}
    documents = [document for cast in casts.values() for document in _describe(cast)]
    documents += universities.values()
    documents += _traps(rng, names, list(casts.values()))
    questions: list[Task] = []
    for split, cast in casts.items():
        asked = _ask(rng, cast, sizes[split], comparison, three_hop, universities)
        questions += [
            Task.question(
                f"w{seed}-{split}-{i:04d}", text, answer, gold, kind, len(gold), split=split
            )
            for i, (text, answer, gold, kind) in enumerate(asked)
        ]
    return tuple(sorted(documents, key=lambda document: document.doc_id)), tuple(questions)


World = tuple[tuple[Document, ...], tuple[Task, ...]]
"""Documents and tasks."""


@dataclass(frozen=True)
class WorldReader(Reader):
    """Calls ``make`` with `data.seed` and `data.options`."""

    make: Callable[..., World] = generate

    brings_documents = True

    def tasks(self, data: GeneratedSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        for number, task in enumerate(self._world(data)[1], 1):
            yield Record(task.id, number, {}), task

    def documents(
        self, data: GeneratedSettings, problems: Problems
    ) -> Iterator[tuple[Record, Document]]:
        for number, document in enumerate(self._world(data)[0], 1):
            yield Record(document.doc_id, number, {}), document

    def _world(self, data: GeneratedSettings) -> World:
        known = [name for name in inspect.signature(self.make).parameters if name != "seed"]
        for name, value in data.options.items():
            if name not in known:
                expected = ", ".join(known)
                raise DataError(
                    f"data.options: unknown option {name!r} of kind {data.kind}; available: {expected}"
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise DataError(f"data.options.{name} is {value!r}; set a number")
        return self.make(data.seed, **data.options)


_Asked = tuple[str, str, tuple[str, ...], str]  # text, answer, gold, type


def _describe(cast: Cast) -> Iterator[Document]:
    described: tuple[Person | Company, ...] = (*cast.people, *cast.companies)
    for one in described:
        yield Document(one.doc_id, one.name, one.text)
    for work in cast.works:
        yield Document(work.doc_id, work.title, work.text)


def _university(rng: random.Random, names: Names, city: str) -> Document:
    year = rng.randint(1930, 1999)
    text = f"{city} University is a university opened in {year}. {city} University has a famous library."
    return Document(names.doc_id(), f"{city} University", text)


def _traps(rng: random.Random, names: Names, casts: Sequence[Cast]) -> Iterator[Document]:
    """Yield documents without answers. Some have the questions' words but no names; others have names but no facts."""
    for kind in KINDS:
        for _ in range(_SURVEYS_A_KIND):
            yield _survey(rng, names, kind)
    for i in range(_FESTIVALS):
        city, cast = rng.choice(lexicon.CITIES), casts[i % len(casts)]
        shown = ", ".join(f"the {work.kind.name} {work.name}" for work in rng.sample(cast.works, 3))
        yield Document(
            names.doc_id(), f"{city} Festival", f"The festival of {city} once showed {shown}."
        )
    for i in range(_TALKS):
        city, cast = rng.choice(lexicon.CITIES), casts[i % len(casts)]
        guests = " and ".join(person.name for person in rng.sample(cast.people, 2))
        yield Document(
            names.doc_id(),
            f"{city} Gazette",
            f"The gazette of {city} printed a long talk with {guests}.",
        )


_TOPICS = (
    ("city", "which city", "a person was born"),
    ("university", "which university", "a person did study"),
    ("award", "which award", "a person did win"),
    ("instrument", "which instrument", "a person did play"),
    ("company", "which company in which city", "a person was based"),
    ("year", "which year", "a person was born first"),
)


def _survey(rng: random.Random, names: Names, kind: Kind) -> Document:
    word, which, what = rng.choice(_TOPICS)
    role = rng.randrange(3)
    noun, verb = kind.nouns[role], kind.verbs[role]
    text = (
        f"A survey of the {kind.name}: {which} is named when {what}, and which {noun} or other person {verb} "
        f"the {kind.name}, or by whom the {kind.name} was {verb} in an earlier {word}."
    )
    return Document(names.doc_id(), f"{kind.name.capitalize()} {noun} by {word}", text)


def _ask(
    rng: random.Random,
    cast: Cast,
    n: int,
    comparison: float,
    three_hop: float,
    universities: dict[str, Document],
) -> list[_Asked]:
    works = list(cast.works)
    rng.shuffle(works)
    asked: dict[str, _Asked] = {}
    n_compare = round(n * comparison)
    n_three = round((n - n_compare) * three_hop)
    while len(asked) < n:
        if len(asked) < n_compare:
            question = _compare(rng, cast)
        elif len(asked) < n_compare + n_three:
            question = _three_hops(rng, works.pop(), universities)
        else:
            question = _bridge(rng, works.pop())
        asked[question[0]] = question
    shuffled = list(asked.values())
    rng.shuffle(shuffled)
    return shuffled


def _maker(rng: random.Random, work: Work, role: int) -> str:
    kind, name = work.kind, work.name
    noun, verb = kind.nouns[role], kind.verbs[role]
    thing = "company" if role == 2 else "person"
    words = (
        f"the {noun} of the {kind.name} {name}",
        f"the {thing} that {verb} the {kind.name} {name}",
    )
    return rng.choice((*words, f"the {thing} by whom the {kind.name} {name} was {verb}"))


_PERSON_FACTS = (
    ("In which city was {} born?", attrgetter("city")),
    ("At which university has {} studied?", attrgetter("university")),
    ("Which award was won by {}?", attrgetter("award")),
    ("Which instrument was played by {}?", attrgetter("instrument")),
    ("In which year was {} born?", attrgetter("year")),
)
_COMPANY_FACTS = (
    ("In which city is {} based?", attrgetter("city")),
    ("In which year was {} founded?", attrgetter("year")),
)


def _bridge(rng: random.Random, work: Work) -> _Asked:
    role = rng.randrange(3)
    description = _maker(rng, work, role)
    maker = work.company if role == 2 else work.people[role]
    question, fact = rng.choice(_COMPANY_FACTS if role == 2 else _PERSON_FACTS)
    return question.format(description), str(fact(maker)), (work.doc_id, maker.doc_id), "bridge"


def _three_hops(rng: random.Random, work: Work, universities: dict[str, Document]) -> _Asked:
    role = rng.randrange(2)
    person = work.people[role]
    university = universities[person.university]
    text = (
        f"In which year was the university opened at which {_maker(rng, work, role)} has studied?"
    )
    year = university.text.split("opened in ")[1][:4]
    return text, year, (work.doc_id, person.doc_id, university.doc_id), "bridge"


def _compare(rng: random.Random, cast: Cast) -> _Asked:
    match rng.randrange(3):
        case 0:
            one, two = rng.sample(cast.people, 2)
            text = f"Which person was born in an earlier year, {one.name} or {two.name}?"
            answer = min(one, two, key=lambda person: person.year).name
            return text, answer, (one.doc_id, two.doc_id), "comparison"
        case 1:
            kind = rng.choice(KINDS)
            first, second = rng.sample([work for work in cast.works if work.kind is kind], 2)
            text = f"Which {kind.name} is from an earlier year, the {kind.name} {first.name} or {second.name}?"
            answer = min(first, second, key=lambda work: work.year).name
            return text, answer, (first.doc_id, second.doc_id), "comparison"
        case _:
            left, right = rng.sample(cast.companies, 2)
            text = f"Is the company {left.name} based in the same city as {right.name}?"
            return (
                text,
                "yes" if left.city == right.city else "no",
                (left.doc_id, right.doc_id),
                "comparison",
            )
