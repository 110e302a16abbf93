"""BABILong: the stories of bAbI, their sentences spread among those of books.

The question file is bAbI's own text (``1 Mary moved to the bathroom.``; a question with tabs before answer and
supporting lines), or JSON lines with ``story``, ``question``, ``answer``, ``support`` (places in the story, from 0). A
task's inputs are ``question`` and ``chunks``, the sentences in order; its gold ids are the places of the supporting
ones, as text.

``data.sentences`` are what a task has in all: the facts keep their order at places drawn at random, and between them
stand sentences of ``data.noise`` that follow one another in the book, from a random one on (after the last, the first).
Of several lengths each task draws one. All draws follow from ``data.noise_seed`` and the task's id. bAbI's text has no
splits: a story goes by the hash of its first two sentences, so that no story stands in two of them.

Source: BABILong (arXiv 2406.10149); bAbI (arXiv 1502.05698).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import cycle, islice
from pathlib import Path

from leret.config.data import BabilongSettings
from leret.core.errors import DataError
from leret.core.types import Document, Json, Task, digest
from leret.datasets.formats.base import Fields, optional_text, text, wrong
from leret.datasets.records import BadRecord, Problems, Record, lines, opened, records
from leret.datasets.splits import rank_of, split_of

_CHUNK_LISTS = 256
"""Tasks whose chunks are kept in memory; the others make them again."""
_LEAST_WORDS = 4
"""Of a sentence of a book: less is a heading, or an exclamation."""
_ENDS = r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)]))(?<!\bMr\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\bMrs\.)"
_BETWEEN = re.compile(_ENDS + r"\s+(?=[\"'“‘(]?[A-Z])")
_GUTENBERG = re.compile(r"\A.*?\*\*\* ?START OF.*?\*\*\*|\*\*\* ?END OF.*\Z", re.DOTALL)


@dataclass(frozen=True, eq=False)
class Noise:
    """Sentences of books, in order; ``name`` is a digest of them."""

    sentences: tuple[str, ...]
    name: str


@dataclass(frozen=True, eq=False)
class Inputs(Mapping[str, Json]):
    """``question`` and ``chunks`` of a task; the chunks are made when they are asked for.

    Attributes:
        places: of the story's sentences among the chunks, growing.
        n: chunks.
        start: the sentence of the book that is the first noise.
    """

    question: str
    story: tuple[str, ...]
    places: tuple[int, ...]
    n: int
    noise: Noise
    start: int

    @property
    def text(self) -> str:
        """Names the inputs without making them: see `Task.text`."""
        told = (
            f"{self.n - len(self.story)} sentences of {self.noise.name[:8]} from {self.start}, facts at {self.places}"
        )
        return f"{' '.join(self.story)} {self.question} ({told})"

    def __getitem__(self, name: str) -> Json:
        if name not in ("question", "chunks"):
            raise KeyError(name)
        own = (self.story, self.places, self.n, self.noise, self.start)
        return self.question if name == "question" else _chunks(*own)

    def __iter__(self) -> Iterator[str]:
        return iter(("question", "chunks"))

    def __len__(self) -> int:
        return 2


@lru_cache(_CHUNK_LISTS)
def _chunks(story: tuple[str, ...], places: tuple[int, ...], n: int, noise: Noise, start: int) -> list[str]:
    rest = islice(cycle(noise.sentences), start, None)
    facts = dict(zip(places, story, strict=True))
    return [facts.get(place) or next(rest) for place in range(n)]


class BabilongReader:
    """Reads stories, and the books of ``data.noise``."""

    brings_documents = False
    repeats_documents = False

    def fits(self, record: Fields) -> bool:
        return "story" in record

    def tasks(self, data: BabilongSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        noise, path = read_noise(data.noise), Path(data.questions)
        with opened(path) as file:
            is_json = file.peek(1)[:1] in (b"{", b"[")
        for record in records(path, problems) if is_json else babi_records(path, problems):
            try:
                task = _task(record.value, data, noise)
            except BadRecord as problem:
                problems.add(record.place, problem)
            else:
                if task is not None:
                    yield record, task

    def documents(self, data: BabilongSettings, problems: Problems) -> Iterator[tuple[Record, Document]]:
        raise DataError("kind babilong has no documents: the chunks of a task are its inputs; leave out data.corpus")


def _task(value: Fields, data: BabilongSettings, noise: Noise) -> Task | None:
    """A story's question; None where the story is longer than wanted."""
    story, support = value.get("story"), value.get("support")
    if not isinstance(story, list) or not story or not all(isinstance(s, str) and s.strip() for s in story):
        raise wrong("story", story, "a list of sentences")
    if not isinstance(support, list) or not support or not all(type(i) is int and 0 <= i < len(story) for i in support):
        raise wrong("support", support, f"places in the story, from 0 to {len(story) - 1}")
    if len(story) > (data.facts or min(data.lengths, default=len(story))):
        return None
    id, question, answer = text(value, "id"), text(value, "question"), optional_text(value, "answer")
    draw = random.Random(rank_of(id, data.noise_seed, "babilong"))
    n = max(len(story), draw.choice(data.lengths) if data.lengths else 0)
    places = tuple(sorted(draw.sample(range(n), len(story))))
    inputs = Inputs(question, tuple(story), places, n, noise, draw.randrange(max(1, len(noise.sentences))))
    gold = tuple(dict.fromkeys(str(places[i]) for i in support))
    answers = () if answer is None else (answer,)
    return Task(id, inputs, gold, answers, optional_text(value, "task"), len(gold), optional_text(value, "split"))


def read_noise(paths: tuple[str, ...]) -> Noise:
    """The sentences of text files, one after the other; of one of Project Gutenberg, without its licence."""
    name, found = blake2b(digest_size=16), list[str]()
    for path in paths:
        with opened(Path(path)) as file:
            content = file.read()
        name.update(content)
        found += _sentences(_GUTENBERG.sub("", content.decode("utf-8", "replace")))
    if paths and not found:
        raise DataError(f"data.noise: {', '.join(paths)} have no sentence of {_LEAST_WORDS} words; name a book")
    return Noise(tuple(found), name.hexdigest())


def _sentences(book: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", book.replace("\r", "").lstrip("\ufeff")):
        for sentence in _BETWEEN.split(" ".join(paragraph.split())):
            if len(sentence.split()) >= _LEAST_WORDS and not sentence.isupper():
                yield sentence


def babi_records(path: Path, problems: Problems) -> Iterator[Record]:
    """The questions of bAbI's text, each with the sentences of its story before it."""
    story: list[str] = []
    places: dict[str, int] = {}
    for number, line in lines(path, problems):
        place = f"{path}:{number}"
        head, _, rest = line.partition(" ")
        if not head.isdigit() or not rest:
            problems.add(place, BadRecord("broken line", f"{line[:60]!r} is no line of bAbI: a number and a sentence"))
            continue
        if head == "1":
            story, places = [], {}
        if "\t" not in rest:
            places[head] = len(story)
            story.append(rest.strip())
            continue
        question, answer, *support = (part.strip() for part in rest.split("\t"))
        found = {"story": list(story), "support": [places.get(n, -1) for n in " ".join(support).split()]}
        named = {"id": f"{path.name.partition('.')[0]}-{number}", "question": question, "answer": answer}
        yield Record(place, number, {**named, **found, "split": split_of(digest(story[:2]))})
