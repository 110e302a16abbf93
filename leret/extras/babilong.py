"""BABILong: bAbI stories among sentences from books.

The sentences of a story are the facts, and the sentences from books are the noise.

The question file has bAbI's text format (lines such as ``1 Mary moved to the bathroom.``; a
question's line ends with its answer and the numbers of its supporting lines, after tabs), or
consists of JSON lines with ``story``, ``question``, ``answer`` and ``support`` (indices of
sentences in the story, from 0). A task's inputs are ``question`` and ``chunks``. The facts keep
their order, at random positions among the chunks. The other chunks are consecutive sentences from
the books in ``data.noise``, read cyclically from a random start. The gold ids are the indices of
the supporting chunks. Random choices depend only on ``data.noise_seed`` and the task's id. A
story's first two sentences decide its split.

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
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from leret.config.base import RecipePath
from leret.config.data import QuestionFiles
from leret.core.errors import DataError
from leret.core.types import Document, Json, Task, digest
from leret.datasets.formats.base import Fields, answers, optional_text, split, text, wrong
from leret.datasets.records import (
    BadRecord,
    LeftOut,
    Problems,
    Reader,
    Record,
    lines,
    open_compressed,
    records,
)
from leret.datasets.splits import rank_of, split_of
from leret.extras.conversations import numbered

_CHUNK_LISTS = 256  # maximum number of tasks whose chunks are cached
_LEAST_WORDS = 4  # shorter sentences of a book are headings or exclamations
_ENDS = r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)]))(?<!\bMr\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\bMrs\.)"
_BETWEEN = re.compile(_ENDS + r"\s+(?=[\"'“‘(]?[A-Z])")
_GUTENBERG = re.compile(r"\A.*?\*\*\* ?START OF.*?\*\*\*|\*\*\* ?END OF.*\Z", re.DOTALL)


class BabilongSettings(QuestionFiles):
    """bAbI stories, with sentences from books inserted between the facts."""

    kind: Literal["babilong"] = "babilong"
    noise: tuple[Annotated[str, RecipePath("text file")], ...] = Field(
        (), description="books (text files)"
    )
    sentences: PositiveInt | tuple[PositiveInt, ...] | None = Field(
        None,
        description="sentences per task (facts plus noise), or a list to draw from per task; None: no noise",
    )
    facts: PositiveInt | None = Field(
        None, description="maximum story length in sentences; None: min(sentences)"
    )
    noise_seed: int = Field(
        0, description="seed for the positions of the facts and the choice of noise"
    )

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.sentences,) if isinstance(self.sentences, int) else self.sentences or ()

    @model_validator(mode="after")
    def _has_noise(self) -> Self:
        if self.sentences and not self.noise:
            raise ValueError(
                "data.noise is missing, but data.sentences needs noise; add a book (text file)"
            )
        return self


@dataclass(frozen=True, eq=False)
class Noise:
    """Sentences of the books, in order; ``name`` is the digest of the files."""

    sentences: tuple[str, ...]
    name: str


@dataclass(frozen=True, eq=False)
class Inputs(Mapping[str, Json]):
    """The inputs ``question`` and ``chunks`` of a task. The chunks are built on access."""

    question: str
    story: tuple[str, ...]
    positions: tuple[int, ...]  # indices of the story's sentences in the chunks, ascending
    n: int  # number of chunks
    noise: Noise
    start: int  # index of the first noise sentence

    @property
    def text(self) -> str:
        """Text that identifies the inputs, without building the chunks; see `Task.text`."""
        n_noise = self.n - len(self.story)
        noise = f"{n_noise} sentences of {self.noise.name[:8]} from {self.start}"
        story = " ".join(self.story)
        return f"{story} {self.question} ({noise}, facts at {self.positions})"

    def __getitem__(self, name: str) -> Json:
        if name == "question":
            return self.question
        if name == "chunks":
            return _chunks(self.story, self.positions, self.n, self.noise, self.start)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(("question", "chunks"))

    def __len__(self) -> int:
        return 2


@lru_cache(_CHUNK_LISTS)
def _chunks(
    story: tuple[str, ...], positions: tuple[int, ...], n: int, noise: Noise, start: int
) -> list[str]:
    rest = islice(cycle(noise.sentences), start, None)
    sentences = dict(zip(positions, story, strict=True))
    return [sentences.get(i) or next(rest) for i in range(n)]


class BabilongReader(Reader):
    """Reads stories, and the books in ``data.noise``."""

    settings = BabilongSettings

    def fits(self, record: Fields) -> bool:
        return "story" in record

    def tasks(self, data: BabilongSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        noise = read_noise(data.noise)
        path = Path(data.questions)
        with open_compressed(path) as file:
            start = file.peek(1)[:1]
        read = records if start in (b"{", b"[") else babi_records
        for record in read(path, problems):
            with problems.at(record.place):
                yield record, _task(record.value, data, noise)

    def documents(
        self, data: BabilongSettings, problems: Problems
    ) -> Iterator[tuple[Record, Document]]:
        raise DataError(
            "kind babilong has no corpus, because chunks are task inputs; remove data.corpus"
        )


def _task(value: Fields, data: BabilongSettings, noise: Noise) -> Task:
    """Build a task from a question and its story.

    LeftOut if the story has more than ``data.facts`` sentences.
    """
    story = _story(value)
    support = _support(value, len(story))
    if len(story) > (data.facts or min(data.lengths, default=len(story))):
        raise LeftOut("story longer than data.facts")
    id = text(value, "id")
    question = text(value, "question")
    draw = random.Random(rank_of(id, data.noise_seed, "babilong"))
    n = len(story)
    if data.lengths:
        n = max(n, draw.choice(data.lengths))
    positions = sorted(draw.sample(range(n), len(story)))
    start = draw.randrange(max(1, len(noise.sentences)))
    inputs = Inputs(question, story, tuple(positions), n, noise, start)
    gold = tuple(dict.fromkeys(str(positions[i]) for i in support))
    kind = optional_text(value, "task")
    return Task(id, inputs, gold, answers(value, "answer"), kind, len(gold), split(value))


def _story(value: Fields) -> tuple[str, ...]:
    story = value.get("story")
    if not isinstance(story, list) or not story:
        raise wrong("story", story, "a list of sentences")
    if not all(isinstance(sentence, str) and sentence.strip() for sentence in story):
        raise wrong("story", story, "a list of sentences")
    return tuple(story)


def _support(value: Fields, n_sentences: int) -> list[int]:
    support = value.get("support")
    expected = f"sentence indices in the story, from 0 to {n_sentences - 1}"
    if not isinstance(support, list) or not support:
        raise wrong("support", support, expected)
    if not all(type(i) is int and 0 <= i < n_sentences for i in support):
        raise wrong("support", support, expected)
    return support


def read_noise(paths: tuple[str, ...]) -> Noise:
    """Read the sentences of text files, without Project Gutenberg's header and licence."""
    name = blake2b(digest_size=16)
    sentences: list[str] = []
    for path in paths:
        with open_compressed(Path(path)) as file:
            content = file.read()
        name.update(content)
        try:
            book = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"data.noise: {path} is not UTF-8 at byte {error.start}; save it as UTF-8"
            ) from error
        sentences += _sentences(_GUTENBERG.sub("", book))
    if paths and not sentences:
        files = ", ".join(paths)
        raise DataError(
            f"data.noise: no sentence of at least {_LEAST_WORDS} words in {files}; use a book"
        )
    return Noise(tuple(sentences), name.hexdigest())


def _sentences(book: str) -> Iterator[str]:
    content = book.replace("\r", "").lstrip("\ufeff")
    for paragraph in re.split(r"\n\s*\n", content):
        line = " ".join(paragraph.split())
        for sentence in _BETWEEN.split(line):
            if len(sentence.split()) >= _LEAST_WORDS and not sentence.isupper():
                yield sentence


def babi_records(path: Path, problems: Problems) -> Iterator[Record]:
    """Yield each question of a file in bAbI's text format, with the sentences before it.

    After a broken or missing line, the rest of the story is broken too.
    """
    story: list[str] = []
    indices: dict[str, int] = {}  # of the story's sentences, by the number of their line
    length = 0  # number of lines of the story
    name = path.name.partition(".")[0]
    for number, line in lines(path, problems):
        place = f"{path}:{number}"
        with problems.at(place):
            head, rest = numbered(line, "bAbI")
            if head == "1":
                story = []
                indices = {}
                length = 0
            if head != str(length + 1):
                fault = f"line {head} of the story follows line {length}"
                raise BadRecord("broken line", f"{fault}; restore the lines between them")
            length += 1
            if "\t" not in rest:
                indices[head] = len(story)
                story.append(rest.strip())
                continue
            question, answer, *support = map(str.strip, rest.split("\t"))
            supporting_lines = " ".join(support).split()
            value = {
                "id": f"{name}-{number}",
                "question": question,
                "answer": answer,
                "story": list(story),
                "support": [indices.get(line_number, -1) for line_number in supporting_lines],
                "split": split_of(digest(story[:2])),
            }
            yield Record(place, number, value)


BABILONG = BabilongReader()
