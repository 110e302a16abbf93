"""Load tasks and corpora.

A text in the field ``relevant_doc_ids`` that is no id of the corpus may hold several ids, separated
by ``|``, ``;``, ``,`` or spaces. It is split if the corpus has all of them.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from leret.config.data import DataSettings
from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.corpus import Corpus
from leret.datasets.formats import reader_of
from leret.datasets.records import BadRecord, Problems
from leret.datasets.splits import rank_of, split_of

UNSPLIT = "relevant_doc_ids with a separator, read as one id without a corpus"
"""Kind of texts that a corpus might split into several ids; see `Loaded.skipped`."""
_SEPARATORS = ("$", r"\|", ";", ",", r"\s", r"[|;,\s]")  # regular expressions; "$": a single id
_DUPLICATE = "same text as a question in split test"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Loaded tasks, and the faults of skipped records."""

    items: tuple[Task, ...]  # in file order, or in hash order with `data.limit` or `data.part`
    # number of skipped and doubtful records by kind
    skipped: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # first faults, one line each
    # ids of all test tasks, and of other tasks with the same text
    held_out: frozenset[str] = frozenset()
    # gold documents of all splits: True if in the corpus
    gold: Mapping[str, bool] = field(default_factory=dict)
    # records of all splits that `data.merge_questions` merged with an earlier one
    n_merged: int = 0

    def __iter__(self) -> Iterator[Task]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class Data:
    """Tasks, and the corpus that has their gold documents. ``problems`` lists skipped documents."""

    tasks: Loaded
    corpus: Corpus
    problems: Problems


def load(data: DataSettings) -> Data:
    """Load tasks with their corpus, and check every gold id.

    DataError if a file does not fit `data.kind`.
    """
    corpus, problems = _read_corpus(data)
    tasks = load_tasks(data, corpus, corpus.parents)
    return Data(tasks, corpus, problems)


def load_tasks(
    data: DataSettings,
    corpus: Collection[str] | None = None,
    parents: Mapping[str, str] | None = None,
) -> Loaded:
    """Load at most `data.limit` tasks of `data.split`.

    A larger limit keeps the tasks of a smaller one.

    Questions in split train or dev with the same text as a test question are left out and counted
    in ``skipped``. With a ``corpus``, every gold id must be in the corpus, up to Unicode
    normalisation. ``parents`` maps the corpus's chunks to their parents; `data.gold: parent` needs
    ``corpus`` and ``parents``. An empty split is a DataError.
    """
    source = _source(data)
    problems = Problems()
    sizes: Counter[str] = Counter()
    test_texts: dict[str, int] = {}  # hash of the text, by id
    training_texts: dict[str, int] = {}  # the same for train and dev
    gold: dict[str, bool] = {}
    all_tasks = _tasks(data, problems, corpus, parents or {}, gold)
    n_merged = 0
    if data.merge_questions:
        all_tasks, n_merged = _merged(all_tasks)

    def of_split() -> Iterator[Task]:
        for task in all_tasks:
            name = split_name(task, data.seed)
            sizes[name] += 1
            texts = test_texts if name == "test" else training_texts
            texts[task.id] = hash(task.text)
            if data.split in ("all", name):
                yield task

    # reads all records, to find all faults
    chosen = limited(of_split(), data.limit, data.seed, data.part)
    problems.check(source, data.skip_invalid, sizes.total() > 0)
    tested = set(test_texts.values())
    duplicates = {id for id, text in training_texts.items() if text in tested}
    tasks = chosen
    if data.split != "all":
        tasks = tuple(task for task in chosen if task.id not in duplicates)
    n_dropped = len(chosen) - len(tasks)
    if not tasks:
        counts = [f"{n} in {name}" for name, n in sorted(sizes.items())]
        splits = ", ".join(counts) or "none"
        dropped = f" ({n_dropped} left out: same text as in split test)" if n_dropped else ""
        raise DataError(
            f"{source}: no question in split {data.split}{dropped}; available: {splits}"
        )
    skipped = dict(problems.skipped)
    if n_dropped:
        skipped[_DUPLICATE] = n_dropped
    held_out = frozenset(test_texts.keys() | duplicates)
    return Loaded(tasks, skipped, tuple(problems.shown), held_out, gold, n_merged)


def load_corpus(data: DataSettings) -> Corpus:
    """Load the documents of `data.corpus`, or else of the question file.

    DataError if there are none.
    """
    corpus, _ = _read_corpus(data)
    return corpus


def has_corpus(data: DataSettings) -> bool:
    """Return True if there is a corpus file, or the question file has documents too."""
    return data.corpus_file is not None or reader_of(data.kind).brings_documents


def split_name(task: Task, seed: int = 0) -> str:
    """Return the task's split: the data set's split, or else the split by hash of the task's id."""
    return task.split or split_of(task.id, seed)


def limited(
    tasks: Iterable[Task], limit: int | None, seed: int = 0, part: str | None = None
) -> tuple[Task, ...]:
    """Return part I/N of the first ``limit`` tasks in hash order of ids.

    If both are None, return all tasks in file order.
    """

    def rank(task: Task) -> int:
        return rank_of(task.id, seed, "limit")

    if part is not None:
        index, count = map(int, part.split("/"))
        first = sorted(tasks, key=rank)[:limit]
        return tuple(first[index::count])
    if limit is not None:
        tasks = heapq.nsmallest(limit, tasks, key=rank)
    return tuple(tasks)


def _tasks(
    data: DataSettings,
    problems: Problems,
    corpus: Collection[str] | None,
    parents: Mapping[str, str],
    coverage: dict[str, bool],
) -> Iterator[Task]:
    """Yield valid tasks, and note in ``coverage`` for each gold document if it is in the corpus."""
    seen: dict[str, tuple[int, int]] = {}
    by_parent = data.gold == "parent"
    if by_parent and corpus is None:
        raise DataError(
            "data.gold is parent, but there is no corpus with the chunks; set data.corpus"
        )
    ids: Container[str] = corpus or ()
    hint = ""
    if by_parent:
        ids = {parents.get(doc_id, doc_id) for doc_id in corpus or ()}
    else:
        if parents:
            hint = "; if gold documents are parents of its chunks, set data.gold: parent"
        parents = {}
    for record, task in reader_of(data.kind).tasks(data, problems):
        with problems.at(record.place):
            content = hash(task.text) if data.merge_questions else record.number
            first, first_content = seen.setdefault(task.id, (record.number, content))
            if content != first_content:
                fault = f"duplicate id {task.id!r}, first used at line or item {first}"
                if not data.merge_questions:
                    fault += "; data.merge_questions: true merges equal questions"
                raise BadRecord("duplicate id", fault)
            cell: Any = record.value.get("relevant_doc_ids")
            is_text = isinstance(cell, str) and task.gold == (cell,)
            if corpus is not None:
                whole = replace(task, gold=_ids_in(cell, ids)) if is_text else task
                yield _with_gold(whole, ids, parents, hint, coverage)
                continue
            if is_text and re.search(_SEPARATORS[-1], cell):
                problems.left_out[UNSPLIT] += 1
            yield task


def _merged(tasks: Iterable[Task]) -> tuple[Iterator[Task], int]:
    """Merge tasks with the same text.

    Return them in order of their first records, and the number of other records.

    A merged task has the first one's id, which decides its split by hash. If the data has splits,
    test takes precedence over dev and train, because a question in split test must not be sampled.
    """
    merged: dict[str, Task] = {}
    n_merged = 0
    for task in tasks:
        first = merged.setdefault(task.text, task)
        if first is not task:
            merged[task.text] = _union(first, task)
            n_merged += 1
    return iter(merged.values()), n_merged


def _union(first: Task, second: Task) -> Task:
    grades = dict(first.grades)
    for doc_id, grade in second.grades.items():
        grades[doc_id] = max(grade, grades.get(doc_id, grade))
    is_graded = set(grades.values()) - {1}
    answers = dict.fromkeys([*first.answers, *second.answers])
    splits = {first.split, second.split}
    return replace(
        first,
        gold=tuple(grades),
        answers=tuple(answers),
        type=first.type or second.type,
        hops=first.hops or second.hops,
        split=next((split for split in ("test", "dev", "train") if split in splits), None),
        relevance=grades if is_graded else {},
    )


def _with_gold(
    task: Task,
    ids: Container[str],
    parents: Mapping[str, str],
    hint: str,
    coverage: dict[str, bool],
) -> Task:
    gold: dict[str, int] = {}
    for doc_id, grade in task.grades.items():
        spelling = _spelling(doc_id, ids)
        coverage[doc_id] = spelling is not None
        gold.setdefault(spelling or doc_id, grade)
    for doc_id in task.gold:
        if not coverage[doc_id]:
            fault = f"gold document {doc_id!r} of question {task.id!r} is not in the corpus{hint}"
            raise BadRecord("unknown gold", fault)
    relevance = gold if task.relevance else {}
    return replace(task, gold=tuple(gold), relevance=relevance, parents=parents)


def _spelling(doc_id: str, ids: Container[str]) -> str | None:
    """Return the Unicode form of an id that the corpus has, if any."""
    forms = (doc_id, *(unicodedata.normalize(form, doc_id) for form in ("NFC", "NFD")))
    return next((form for form in forms if form in ids), None)


def _ids_in(cell: str, ids: Container[str]) -> tuple[str, ...]:
    """Return the ids in a text, by the first separator that finds the largest share of ids."""

    def share(parts: list[str]) -> float:
        spellings = [_spelling(part, ids) for part in parts]
        n_ids = len(parts) - spellings.count(None)
        return n_ids / max(1, len(parts))

    splits = []
    for separator in _SEPARATORS:
        parts = map(str.strip, re.split(separator, cell))
        splits.append([part for part in parts if part])
    best = max(splits, key=share)
    return tuple(best)


def skipped_notes(source: str, skipped: Mapping[str, int]) -> list[str]:
    """Return notes on the skipped and doubtful records of a source."""
    return [f"{source}: {n:,} records skipped or doubtful ({kind})" for kind, n in skipped.items()]


def _source(data: DataSettings) -> str:
    return str(getattr(data, "questions", data.kind))


def _read_corpus(data: DataSettings) -> tuple[Corpus, Problems]:
    if not has_corpus(data):
        raise DataError(
            f"files of kind {data.kind} have no documents; set data.corpus to a corpus file"
        )
    source = data.corpus_file or _source(data)
    problems = Problems()
    corpus = Corpus(_documents(data, problems))
    problems.check(source, data.skip_invalid, len(corpus) > 0)
    if not len(corpus):
        advice = "set data.corpus to a corpus file"
        if data.corpus_file:
            advice = "choose a file with doc_id, title and text"
        raise DataError(f"{source} has no documents; {advice}")
    corpus.skipped = problems.skipped
    return corpus, problems


def _documents(data: DataSettings, problems: Problems) -> Iterator[Document]:
    reader = reader_of(data.kind)
    seen: dict[str, tuple[int, int]] = {}  # number of the record and hash of the document, by id
    for record, document in reader.documents(data, problems):
        if document.doc_id not in seen:
            seen[document.doc_id] = record.number, hash(document)
            yield document
            continue
        first, content = seen[document.doc_id]
        if not reader.repeats_documents:
            fault = f"duplicate id {document.doc_id!r}, first used at line or item {first}"
            problems.add(record.place, BadRecord("duplicate id", fault))
        elif content != hash(document):
            problems.left_out["document with an id of another text"] += 1
