"""A generated world: short documents about invented people, works and companies, and questions.

`leret demo` uses this world because it needs no download, no model knows its names, and its
questions need search. A bridge question names a work and asks about one of its makers, so the first
document is needed to search for the second. A comparison question names both entities. Some
documents are traps for lexical search: works share a name, people share a first or last name, and
surveys, festivals and gazettes contain the questions' words or names but no answers. Each person,
work and company occurs in the questions of only one split.
"""

from __future__ import annotations

import functools
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


@functools.lru_cache(maxsize=1)
def generate(
    seed: int,
    n_train: int = 600,
    n_dev: int = 150,
    n_test: int = 550,
    comparison: float = 0.25,
    three_hop: float = 0.0,
) -> tuple[tuple[Document, ...], tuple[Task, ...]]:
    """Return documents sorted by id, and train, dev and test questions.

    The gold documents of a question are in hop order.

    ``comparison`` is the share of questions that compare two named entities. ``three_hop`` is the
    share of bridge questions with a third document, a university; universities are shared by all
    splits. Shares are in [0, 1].
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
    casts: dict[str, Cast] = {}
    for split, n in sizes.items():
        if n:
            n_people = n + 8
            n_companies = n // 5 + 4
            n_works = n + 24
            casts[split] = make_cast(rng, names, n_people, n_companies, n_works)
    universities = {f"{city} University": _university(rng, names, city) for city in lexicon.CITIES}
    documents: list[Document] = []
    for cast in casts.values():
        documents += _describe(cast)
    documents += universities.values()
    documents += _traps(rng, names, list(casts.values()))
    documents.sort(key=lambda document: document.doc_id)
    tasks: list[Task] = []
    for split, cast in casts.items():
        questions = _ask(rng, cast, sizes[split], comparison, three_hop, universities)
        for i, (text, answer, gold, kind) in enumerate(questions):
            id = f"w{seed}-{split}-{i:04d}"
            task = Task.question(id, text, answer, gold, kind, len(gold), split=split)
            tasks.append(task)
    return tuple(documents), tuple(tasks)


World = tuple[tuple[Document, ...], tuple[Task, ...]]
"""Documents and tasks."""


@dataclass(frozen=True)
class WorldReader(Reader):
    """Calls ``make`` with `data.seed` and `data.options`."""

    make: Callable[..., World] = generate

    settings = GeneratedSettings
    brings_documents = True

    def tasks(self, data: GeneratedSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        _, tasks = self._world(data)
        for number, task in enumerate(tasks, 1):
            record = Record(task.id, number, {})
            yield record, task

    def documents(
        self, data: GeneratedSettings, problems: Problems
    ) -> Iterator[tuple[Record, Document]]:
        documents, _ = self._world(data)
        for number, document in enumerate(documents, 1):
            record = Record(document.doc_id, number, {})
            yield record, document

    def _world(self, data: GeneratedSettings) -> World:
        parameters = inspect.signature(self.make).parameters
        options = [name for name in parameters if name != "seed"]
        for name, value in data.options.items():
            if name not in options:
                available = ", ".join(options)
                raise DataError(
                    f"data.options: unknown option {name!r} of kind {data.kind}; "
                    f"available: {available}"
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise DataError(f"data.options.{name} is {value!r}; set a number")
        return self.make(data.seed, **data.options)


_Asked = tuple[str, str, tuple[str, ...], str]  # text, answer, gold, type


def _describe(cast: Cast) -> Iterator[Document]:
    for person in cast.people:
        yield Document(person.doc_id, person.name, person.text)
    for company in cast.companies:
        yield Document(company.doc_id, company.name, company.text)
    for work in cast.works:
        yield Document(work.doc_id, work.title, work.text)


def _university(rng: random.Random, names: Names, city: str) -> Document:
    year = rng.randint(1930, 1999)
    name = f"{city} University"
    text = f"{name} is a university opened in {year}. {name} has a famous library."
    return Document(names.doc_id(), name, text)


def _traps(rng: random.Random, names: Names, casts: Sequence[Cast]) -> Iterator[Document]:
    """Yield documents without answers.

    Some have the questions' words but no names; others have names but no facts.
    """
    for kind in KINDS:
        for _ in range(_SURVEYS_A_KIND):
            yield _survey(rng, names, kind)
    for i in range(_FESTIVALS):
        city = rng.choice(lexicon.CITIES)
        cast = casts[i % len(casts)]
        works = rng.sample(cast.works, 3)
        shown = ", ".join(f"the {work.kind.name} {work.name}" for work in works)
        text = f"The festival of {city} once showed {shown}."
        yield Document(names.doc_id(), f"{city} Festival", text)
    for i in range(_TALKS):
        city = rng.choice(lexicon.CITIES)
        cast = casts[i % len(casts)]
        first, second = rng.sample(cast.people, 2)
        text = f"The gazette of {city} printed a long talk with {first.name} and {second.name}."
        yield Document(names.doc_id(), f"{city} Gazette", text)


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
    noun = kind.nouns[role]
    verb = kind.verbs[role]
    work = kind.name
    title = f"{work.capitalize()} {noun} by {word}"
    text = (
        f"A survey of the {work}: {which} is named when {what}, and which {noun} or other person "
        f"{verb} the {work}, or by whom the {work} was {verb} in an earlier {word}."
    )
    return Document(names.doc_id(), title, text)


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
        text = question[0]
        asked[text] = question
    shuffled = list(asked.values())
    rng.shuffle(shuffled)
    return shuffled


def _maker(rng: random.Random, work: Work, role: int) -> str:
    noun = work.kind.nouns[role]
    verb = work.kind.verbs[role]
    name = f"the {work.kind.name} {work.name}"
    thing = "company" if role == 2 else "person"
    descriptions = (
        f"the {noun} of {name}",
        f"the {thing} that {verb} {name}",
        f"the {thing} by whom {name} was {verb}",
    )
    return rng.choice(descriptions)


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
    maker: Person | Company
    if role == 2:
        maker = work.company
        question, fact = rng.choice(_COMPANY_FACTS)
    else:
        maker = work.people[role]
        question, fact = rng.choice(_PERSON_FACTS)
    text = question.format(description)
    answer = str(fact(maker))
    return text, answer, (work.doc_id, maker.doc_id), "bridge"


def _three_hops(rng: random.Random, work: Work, universities: dict[str, Document]) -> _Asked:
    role = rng.randrange(2)
    person = work.people[role]
    university = universities[person.university]
    description = _maker(rng, work, role)
    text = f"In which year was the university opened at which {description} has studied?"
    _, _, rest = university.text.partition("opened in ")
    year = rest[:4]
    return text, year, (work.doc_id, person.doc_id, university.doc_id), "bridge"


def _compare(rng: random.Random, cast: Cast) -> _Asked:
    compare = rng.choice((_compare_people, _compare_works, _compare_companies))
    return compare(rng, cast)


def _compare_people(rng: random.Random, cast: Cast) -> _Asked:
    first, second = rng.sample(cast.people, 2)
    text = f"Which person was born in an earlier year, {first.name} or {second.name}?"
    older = min(first, second, key=lambda person: person.year)
    return text, older.name, (first.doc_id, second.doc_id), "comparison"


def _compare_works(rng: random.Random, cast: Cast) -> _Asked:
    kind = rng.choice(KINDS)
    works = [work for work in cast.works if work.kind is kind]
    first, second = rng.sample(works, 2)
    names = f"the {kind.name} {first.name} or {second.name}"
    text = f"Which {kind.name} is from an earlier year, {names}?"
    older = min(first, second, key=lambda work: work.year)
    return text, older.name, (first.doc_id, second.doc_id), "comparison"


def _compare_companies(rng: random.Random, cast: Cast) -> _Asked:
    first, second = rng.sample(cast.companies, 2)
    text = f"Is the company {first.name} based in the same city as {second.name}?"
    answer = "yes" if first.city == second.city else "no"
    return text, answer, (first.doc_id, second.doc_id), "comparison"
