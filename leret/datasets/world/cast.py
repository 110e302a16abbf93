"""People, companies and works of the generated world, and the lexicon of their names.

Every name is a pair of parts. The lists of parts share no word, so a word identifies the kind of
its name, and an unseen name is a new pair of known parts. All words are invented or everyday
English.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import product

_LEXICON = resources.files("leret.datasets.world") / "lexicon.txt"
_LINES = _LEXICON.read_text(encoding="utf-8").splitlines()
LISTS = {name: tuple(words) for name, *words in map(str.split, _LINES)}
FIRST_NAMES = LISTS["FIRST_NAMES"]
LAST_NAMES = LISTS["LAST_NAMES"]
CITIES = LISTS["CITIES"]
ADJECTIVES = LISTS["ADJECTIVES"]
NOUNS = LISTS["NOUNS"]
FIRMS = LISTS["FIRMS"]
TRADES = LISTS["TRADES"]
AWARDS = LISTS["AWARDS"]
INSTRUMENTS = LISTS["INSTRUMENTS"]


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of work, with the words for its two makers and its company."""

    name: str
    verbs: tuple[str, str, str]  # past participle: "directed"
    nouns: tuple[str, str, str]  # "director"
    genres: tuple[str, ...]


KINDS = (
    Kind(
        "film",
        ("directed", "scripted", "produced"),
        ("director", "screenwriter", "studio"),
        ("drama", "crime"),
    ),
    Kind(
        "novel",
        ("written", "illustrated", "published"),
        ("author", "illustrator", "publisher"),
        ("gothic", "spy"),
    ),
    Kind(
        "album",
        ("recorded", "arranged", "released"),
        ("singer", "arranger", "label"),
        ("folk", "jazz"),
    ),
    Kind(
        "play",
        ("penned", "staged", "sponsored"),
        ("playwright", "stage manager", "sponsor"),
        ("tragic", "comic"),
    ),
    Kind(
        "opera",
        ("composed", "choreographed", "financed"),
        ("composer", "choreographer", "patron"),
        ("grand", "heroic"),
    ),
    Kind(
        "game",
        ("designed", "scored", "developed"),
        ("designer", "musician", "developer"),
        ("puzzle", "racing"),
    ),
)


@dataclass(frozen=True, slots=True)
class Person:
    """A person, with the facts in the person's document."""

    doc_id: str
    name: str
    trade: str
    year: int
    city: str
    university: str
    award: str
    instrument: str

    @property
    def text(self) -> str:
        last = self.name.split()[-1]
        return (
            f"{self.name} is a {self.trade} born in {self.year} in {self.city}. "
            f"{last} studied at {self.university}, "
            f"won the {self.award} and played the {self.instrument}."
        )


@dataclass(frozen=True, slots=True)
class Company:
    """A company and its founder."""

    doc_id: str
    name: str
    sector: str
    year: int
    city: str
    founder: Person

    @property
    def text(self) -> str:
        return (
            f"{self.name} is a {self.sector} company based in {self.city}. "
            f"{self.name} was founded in {self.year} by {self.founder.name}."
        )


@dataclass(frozen=True, slots=True)
class Work:
    """A work. Works of different kinds may share a name."""

    doc_id: str
    name: str
    kind: Kind
    genre: str
    year: int
    people: tuple[Person, Person]
    company: Company
    wording: int

    @property
    def title(self) -> str:
        """Title of the document, which distinguishes works with the same name."""
        return f"{self.name} ({self.kind.name})"

    @property
    def text(self) -> str:
        kind = self.kind.name
        did, also, backed = self.kind.verbs
        first = self.people[0].name
        second = self.people[1].name
        company = self.company.name
        if self.wording == 0:
            return (
                f"{self.name} is a {self.year} {self.genre} {kind} "
                f"{did} by {first} and {also} by {second}. The {kind} was {backed} by {company}."
            )
        return (
            f"{self.name} is a {self.genre} {kind} {backed} by {company} in {self.year}. "
            f"The {kind} was {also} by {second} and {did} by {first}."
        )


@dataclass(frozen=True, slots=True)
class Cast:
    """People, companies and works that the questions in one split are about."""

    people: tuple[Person, ...]
    companies: tuple[Company, ...]
    works: tuple[Work, ...]


class Names:
    """Generators of unique names, and of ``n_documents`` ids in random order."""

    def __init__(self, rng: random.Random, n_documents: int) -> None:
        self.person = _pairs(rng, FIRST_NAMES, LAST_NAMES, "{} {}").__next__
        self.work = _pairs(rng, ADJECTIVES, NOUNS, "The {} {}").__next__
        self.company = _pairs(rng, FIRMS, TRADES, "{} {}").__next__
        ids = list(range(n_documents))
        rng.shuffle(ids)
        self.doc_id = (f"d{i:05d}" for i in ids).__next__


def _pairs(
    rng: random.Random, first: Sequence[str], second: Sequence[str], form: str
) -> Iterator[str]:
    pairs = list(product(first, second))
    rng.shuffle(pairs)
    return (form.format(*pair) for pair in pairs)


def make_cast(
    rng: random.Random, names: Names, n_people: int, n_companies: int, n_works: int
) -> Cast:
    """Invent people (at least 2), companies (at least 1) and works.

    Two to four works in a row share a name.
    """
    people = tuple(_person(rng, names) for _ in range(n_people))
    companies = tuple(_company(rng, names, people) for _ in range(n_companies))
    works: list[Work] = []
    while len(works) < n_works:
        name = names.work()
        kinds = rng.sample(KINDS, rng.randint(2, 4))
        works += [_work(rng, names, name, kind, people, companies) for kind in kinds]
    return Cast(people, companies, tuple(works[:n_works]))


def _person(rng: random.Random, names: Names) -> Person:
    pick: Callable[[Sequence[str]], str] = rng.choice
    city = pick(CITIES)
    campus = pick(CITIES)
    trade = pick(("artist", "writer", "maker", "performer", "craftsman", "teacher"))
    year = rng.randint(1930, 1999)
    patron = pick(AWARDS)
    prize = pick(("Medal", "Prize"))
    return Person(
        doc_id=names.doc_id(),
        name=names.person(),
        trade=trade,
        year=year,
        city=city,
        university=f"{campus} University",
        award=f"{patron} {prize}",
        instrument=pick(INSTRUMENTS),
    )


def _company(rng: random.Random, names: Names, people: Sequence[Person]) -> Company:
    return Company(
        doc_id=names.doc_id(),
        name=names.company(),
        sector=rng.choice(("media", "trading", "cultural", "family")),
        year=rng.randint(1930, 1999),
        city=rng.choice(CITIES),
        founder=rng.choice(people),
    )


def _work(
    rng: random.Random,
    names: Names,
    name: str,
    kind: Kind,
    people: Sequence[Person],
    companies: Sequence[Company],
) -> Work:
    first, second = rng.sample(people, 2)
    return Work(
        doc_id=names.doc_id(),
        name=name,
        kind=kind,
        genre=rng.choice(kind.genres),
        year=rng.randint(1930, 1999),
        people=(first, second),
        company=rng.choice(companies),
        wording=rng.randrange(2),
    )
