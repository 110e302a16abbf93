"""Questions and corpora, ready to use: the entry of every stage."""

from __future__ import annotations

import heapq
import inspect
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.corpus import Corpus
from leret.datasets.formats.load import FORMATS, read_documents, read_questions
from leret.datasets.records import Problems
from leret.datasets.splits import rank_of, split_of
from leret.datasets.world.generate import generate

_SPLITS = ("train", "dev", "test", "all")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """What was read, and what was not.

    Attributes:
        items: in the order of the file, or of the limit.
        skipped: bad records left out, by kind of fault.
        problems: the first of them, one line each.
    """

    items: tuple[T, ...]
    skipped: Mapping[str, int]
    problems: tuple[str, ...] = ()

    @property
    def n_skipped(self) -> int:
        """Bad records left out."""
        return sum(self.skipped.values())

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class Data:
    """Questions, and the corpus that their gold is in.

    Attributes:
        problems: bad records of the corpus left out.
    """

    questions: Loaded[Task]
    corpus: Corpus
    problems: Problems


def load(
    kind: str,
    questions: str | None = None,
    corpus: str | None = None,
    *,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    skip_invalid: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Data:
    """Questions with their corpus, every gold id checked.

    Args:
        kind: jsonl, beir, hotpotqa, hover, musique, 2wiki or world.
        questions: path, or ``hf:NAME``; None for kind world.
        corpus: path, or ``hf:NAME``. None takes it from where the questions are: the folder of kind beir, or the
            contexts in the official files of HotpotQA, MuSiQue and 2WikiMultihopQA.
        split: train, dev or test; None and ``all`` take every question.
        limit: questions at most; the same seed and a larger limit only add to them.
        seed: of the splits by hash, of the choice under ``limit``, of the generated world.
        skip_invalid: leave bad records out and count them.
        options: arguments of the generator, for kind world.

    Raises:
        DataError: something cannot be read as what it claims to be.
    """
    if kind == "world":
        documents, made = _world(seed, options)
        return Data(Loaded(_choose(made, "world", split, limit, seed), {}), Corpus(documents), Problems())
    _check_kind(kind, options)
    if questions is None:
        raise DataError(f"data.questions is missing: kind {kind} reads a file")
    if corpus is None and kind in {"jsonl", "hover"}:
        raise DataError(f"data.corpus is missing: a file of kind {kind} holds questions alone; name the corpus")
    texts, problems = _read_corpus(kind, corpus or questions, skip_invalid)
    loaded = load_questions(
        kind, questions, split=split, limit=limit, seed=seed, skip_invalid=skip_invalid, corpus=texts
    )
    return Data(loaded, texts, problems)


def load_questions(
    kind: str,
    path: str | None = None,
    *,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    skip_invalid: bool = False,
    corpus: Container[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Loaded[Task]:
    """Questions alone.

    Args:
        kind: as in `load`.
        path: path, or ``hf:NAME``; None for kind world.
        split: as in `load`.
        limit: as in `load`.
        seed: as in `load`.
        skip_invalid: as in `load`.
        corpus: where gold ids must be; None checks none.
        options: as in `load`.

    Raises:
        DataError: the source cannot be read, or the split is empty.
    """
    if kind == "world":
        return Loaded(_choose(_world(seed, options)[1], "world", split, limit, seed), {})
    _check_kind(kind, options)
    if path is None:
        raise DataError(f"data.questions is missing: kind {kind} reads a file")
    problems = Problems()
    chosen = _choose(
        read_questions(kind, str(path), problems, corpus), str(path), split, limit, seed, problems, skip_invalid
    )
    return Loaded(chosen, dict(problems.kinds), tuple(problems.shown))


def load_corpus(
    kind: str,
    path: str | None = None,
    *,
    seed: int = 0,
    skip_invalid: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Corpus:
    """A corpus alone.

    Args:
        kind: as in `load`.
        path: path, or ``hf:NAME``; None for kind world.
        seed: of the generated world.
        skip_invalid: leave bad records out.
        options: as in `load`.

    Raises:
        DataError: the source cannot be read, or holds no document.
    """
    if kind == "world":
        return Corpus(_world(seed, options)[0])
    _check_kind(kind, options)
    if path is None:
        raise DataError(f"data.corpus is missing: kind {kind} reads a file")
    return _read_corpus(kind, str(path), skip_invalid)[0]


def split_name(question: Task, seed: int = 0) -> str:
    """The split of a question: the data set's own, or else by the hash of its id."""
    return question.split or split_of(question.id, seed)


def limited(questions: Iterable[Task], limit: int | None, seed: int = 0) -> tuple[Task, ...]:
    """At most so many questions, by a hash of their ids; None takes all, in their order."""
    if limit is None:
        return tuple(questions)
    return tuple(heapq.nsmallest(limit, questions, key=lambda question: rank_of(question.id, seed, "limit")))


def _read_corpus(kind: str, source: str, skip_invalid: bool) -> tuple[Corpus, Problems]:
    problems = Problems()
    corpus = Corpus(read_documents(kind, source, problems))
    problems.check(source, skip_invalid, len(corpus) > 0)
    if not len(corpus):
        raise DataError(f"{source} holds no document; name the corpus with data.corpus")
    return corpus, problems


def _choose(
    questions: Iterable[Task],
    source: str,
    split: str | None,
    limit: int | None,
    seed: int,
    problems: Problems | None = None,
    skip_invalid: bool = False,
) -> tuple[Task, ...]:
    """The questions of a split, at most ``limit`` of them; the source is read to its end, so that all faults show."""
    split = split or "all"
    if split not in _SPLITS:
        raise DataError(f"split {split!r}: there are {', '.join(_SPLITS)}")
    if limit is not None and limit < 1:
        raise DataError(f"limit {limit}: ask for one question at least")
    sizes: Counter[str] = Counter()

    def wanted() -> Iterator[Task]:
        for question in questions:
            name = split_name(question, seed)
            sizes[name] += 1
            if split in ("all", name):
                yield question

    chosen = limited(wanted(), limit, seed)
    if problems is not None:
        problems.check(source, skip_invalid, sizes.total() > 0)
    if not chosen:
        there = ", ".join(f"{n} in {name}" for name, n in sorted(sizes.items())) or "none at all"
        raise DataError(f"{source}: no question in split {split}; there are {there}")
    return chosen


def _world(seed: int, options: Mapping[str, Any] | None) -> tuple[tuple[Document, ...], tuple[Task, ...]]:
    known = [name for name in inspect.signature(generate).parameters if name != "seed"]
    for name, value in (options or {}).items():
        if name not in known:
            raise DataError(f"data.options: the world has no option {name!r}; it has {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"data.options.{name} is {value!r}; it should be a number")
    return generate(seed, **(options or {}))


def _check_kind(kind: str, options: Mapping[str, Any] | None) -> None:
    if kind not in FORMATS:
        raise DataError(f"data.kind is {kind!r}; it should be one of {', '.join([*FORMATS, 'world'])}")
    if options:
        raise DataError(f"data.options is given, but kind {kind} has none; only kind world is generated")
