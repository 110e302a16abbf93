"""Tasks and corpora, ready to use: the entry of every stage."""

from __future__ import annotations

import heapq
import unicodedata
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from leret.config.data import DataSettings
from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.corpus import Corpus
from leret.datasets.formats import reader_of
from leret.datasets.records import BadRecord, Problems
from leret.datasets.splits import rank_of, split_of

_DOUBLE = "the text of a question in split test"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tasks that were read, and what was not."""

    items: tuple[Task, ...]  # in the order of the file, or of the limit
    skipped: Mapping[str, int] = field(default_factory=dict)  # records left out, by kind of fault
    problems: tuple[str, ...] = ()  # the first of them, one line each
    held_out: frozenset[str] = frozenset()  # ids, of the whole source, of split test, and those with the text of one

    def __iter__(self) -> Iterator[Task]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class Data:
    """Tasks, and the corpus that their gold is in; ``problems`` are bad records of the corpus left out."""

    tasks: Loaded
    corpus: Corpus
    problems: Problems


def load(data: DataSettings) -> Data:
    """Tasks with their corpus, every gold id checked; DataError where one cannot be read as what it claims to be."""
    corpus, problems = _read_corpus(data)
    return Data(load_tasks(data, corpus), corpus, problems)


def load_tasks(data: DataSettings, corpus: Container[str] | None = None) -> Loaded:
    """Read the tasks of `data.split`, at most `data.limit`; a larger limit only adds to them, or to `data.part`.

    A question of split train or dev with the text of one in split test is left out, and counted in ``skipped``.
    Gold ids must be in ``corpus``, where one is given; one that is there under another Unicode normalisation takes the
    corpus's form. An empty split is a DataError.
    """
    source = data.questions or data.kind
    problems = Problems()
    sizes: Counter[str] = Counter()
    test, others = dict[str, int](), dict[str, int]()  # hashes of their texts, by id

    def wanted() -> Iterator[Task]:
        for task in _tasks(data, problems, corpus):
            name = split_name(task, data.seed)
            sizes[name] += 1
            (test if name == "test" else others)[task.id] = hash(task.text)
            if data.split in ("all", name):
                yield task

    chosen = limited(wanted(), data.limit, data.seed, data.part)  # reads the source to its end, so that all faults show
    problems.check(source, data.skip_invalid, sizes.total() > 0)
    tested = set(test.values())
    doubles = {id for id, text in others.items() if text in tested}
    kept = tuple(task for task in chosen if data.split == "all" or task.id not in doubles)
    if not kept:
        there = ", ".join(f"{n} in {name}" for name, n in sorted(sizes.items())) or "none at all"
        lost = f" ({len(chosen)} with the text of one in test)" if chosen else ""
        raise DataError(f"{source}: no question in split {data.split}{lost}; there are {there}")
    skipped = dict(problems.kinds) | ({_DOUBLE: len(chosen) - len(kept)} if len(kept) < len(chosen) else {})
    return Loaded(kept, skipped, tuple(problems.shown), frozenset(test.keys() | doubles))


def load_corpus(data: DataSettings) -> Corpus:
    """The documents of `data.corpus`, or those that the source of the tasks brings; none at all is a DataError."""
    return _read_corpus(data)[0]


def has_corpus(data: DataSettings) -> bool:
    """Whether a corpus is named, or comes with the tasks."""
    return data.corpus is not None or reader_of(data.kind).brings_documents


def split_name(task: Task, seed: int = 0) -> str:
    """The split of a task: the data set's own, or else by the hash of its id."""
    return task.split or split_of(task.id, seed)


def limited(tasks: Iterable[Task], limit: int | None, seed: int = 0, part: str | None = None) -> tuple[Task, ...]:
    """At most so many tasks, by a hash of their ids, and of these ``part`` I/N; None takes all, in their order."""

    def rank(task: Task) -> int:
        return rank_of(task.id, seed, "limit")

    if part is None:
        return tuple(tasks if limit is None else heapq.nsmallest(limit, tasks, key=rank))
    index, count = map(int, part.split("/"))
    return tuple(sorted(tasks, key=rank)[:limit][index::count])


def _tasks(data: DataSettings, problems: Problems, corpus: Container[str] | None) -> Iterator[Task]:
    seen: dict[str, int] = {}
    for record, task in reader_of(data.kind).tasks(data, problems):
        try:
            first = seen.setdefault(task.id, record.number)
            if first != record.number:
                raise BadRecord("duplicate id", f"id {task.id!r} was there before, at number {first}")
            yield task if corpus is None else _with_gold(task, corpus)
        except BadRecord as problem:
            problems.add(record.place, problem)


def _with_gold(task: Task, corpus: Container[str]) -> Task:
    gold: dict[str, int] = {}
    for doc_id, grade in task.grades.items():
        forms = (doc_id, *(unicodedata.normalize(form, doc_id) for form in ("NFC", "NFD")))
        known = next((form for form in forms if form in corpus), None)
        if known is None:
            raise BadRecord("unknown gold", f"gold document {doc_id!r} of question {task.id!r} is not in the corpus")
        gold.setdefault(known, grade)
    return replace(task, gold=tuple(gold), relevance=gold if task.relevance else {})


def _read_corpus(data: DataSettings) -> tuple[Corpus, Problems]:
    if not has_corpus(data):
        raise DataError(f"data.corpus is missing: a file of kind {data.kind} holds questions alone; name the corpus")
    source = data.corpus or data.questions or data.kind
    problems = Problems()
    corpus = Corpus(_documents(data, problems))
    problems.check(source, data.skip_invalid, len(corpus) > 0)
    if not len(corpus):
        raise DataError(f"{source} holds no document; name the corpus with data.corpus")
    return corpus, problems


def _documents(data: DataSettings, problems: Problems) -> Iterator[Document]:
    reader = reader_of(data.kind)
    seen: dict[str, int] = {}
    for record, document in reader.documents(data, problems):
        first = seen.get(document.doc_id)
        if first is None:
            seen[document.doc_id] = record.number
            yield document
        elif not reader.repeats_documents:
            fault = f"document {document.doc_id!r} was there before, at number {first}"
            problems.add(record.place, BadRecord("duplicate id", fault))
