"""Statistics of a data set, for `leret data inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mean, median
from typing import Any

from leret.config.data import DataSettings
from leret.core.types import Task, digest
from leret.datasets.columns import guess
from leret.datasets.corpus import Corpus
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.load import has_corpus, load, load_tasks, split_name
from leret.datasets.records import Problems

_ROWS = 10_000  # rows of a file that show its columns


@dataclass(frozen=True, slots=True)
class DataReport:
    """Statistics of a data set. Mappings count tasks, unless a comment says otherwise."""

    n_documents: int  # 0 without a corpus
    n_parents: int  # documents of the chunks; 0 if no document has a parent
    corpus_digest: str | None
    n_questions: int  # bad records are not counted
    splits: Mapping[str, int]  # by split: the data set's own split, or else the hash of the id
    own_splits: bool
    inputs: Mapping[str, int]  # by input names ("question"; "persona, turns")
    types: Mapping[str, int]
    hops: Mapping[int, int]  # by number of hops, 0 if unknown
    gold: Mapping[int, int]  # by number of gold documents
    # share of gold documents that the corpus has; None without corpus or gold documents
    gold_coverage: float | None
    answers: Mapping[int, int]  # by number of reference answers
    # minimum, median, mean and maximum; all 0 without questions
    question_words: Mapping[str, float]
    document_words: Mapping[str, float]  # title included
    n_unused_documents: int  # documents that are gold for no task
    duplicate_questions: int  # questions with the same text as another question
    n_merged: int  # records that `data.merge_questions` merged with an earlier one
    duplicate_documents: int
    # bad, doubtful and left-out records of the question and corpus files, by kind
    skipped: Mapping[str, int]
    problems: tuple[str, ...]  # first faults, one line each
    examples: tuple[Task, ...]  # first tasks


def inspect(data: DataSettings, n_examples: int = 3) -> DataReport:
    """Inspect all splits of a data set, ignoring `data.limit`, and the corpus if there is one.

    Bad records raise a DataError. With ``data.skip_invalid``, they are part of the report instead.
    """
    data = data.model_copy(update={"split": "all", "limit": None})
    if has_corpus(data):
        loaded = load(data)
        tasks = loaded.tasks
        corpus = loaded.corpus
        problems = loaded.problems
    else:
        tasks = load_tasks(data)
        corpus = Corpus(())
        problems = Problems()
    gold: set[str] = set()
    for task in tasks:
        gold.update(task.gold)
    parents = corpus.parents if data.gold == "parent" else {}
    n_unused = 0
    for doc_id in corpus:
        if parents.get(doc_id, doc_id) not in gold:
            n_unused += 1
    document_lengths = []
    for document in corpus.values():  # lazy: decoded one at a time
        length = len(document.title.split()) + len(document.text.split())
        document_lengths.append(length)
    question_lengths = [len(task.text.split()) for task in tasks]
    skipped = Counter(tasks.skipped) + problems.kinds
    return DataReport(
        n_documents=len(corpus),
        n_parents=len(set(corpus.parents.values())),
        corpus_digest=corpus.digest if len(corpus) else None,
        n_questions=len(tasks),
        splits=_counted(split_name(task, data.seed) for task in tasks),
        own_splits=any(task.split for task in tasks),
        inputs=_counted(", ".join(task.inputs) for task in tasks),
        types=_counted(task.type or "unknown" for task in tasks),
        hops=_counted(task.hops or 0 for task in tasks),
        gold=_counted(len(task.gold) for task in tasks),
        gold_coverage=mean(tasks.gold.values()) if tasks.gold else None,
        answers=_counted(len(task.answers) for task in tasks),
        question_words=_spread(question_lengths),
        document_words=_spread(document_lengths),
        n_unused_documents=n_unused,
        duplicate_questions=_repeated(digest(task.text) for task in tasks),
        n_merged=tasks.n_merged,
        duplicate_documents=_repeated(digest(document.text) for document in corpus.values()),
        skipped=dict(skipped | problems.left_out),
        problems=(*tasks.problems, *problems.shown),
        examples=tasks.items[:n_examples],
    )


def guess_fields(questions: str, corpus: str | None, flags: Mapping[str, Any]) -> dict[str, str]:
    """Guess `data.fields` from the first rows of a question file and of its corpus; see `guess`.

    Both files are of kind jsonl.
    """
    tables = []
    if corpus is not None:
        tables.append((corpus, True, _first_rows(corpus)))
    tables.append((questions, False, _first_rows(questions)))
    return guess(tables, flags)


def _first_rows(source: str) -> list[Mapping[str, Any]]:
    records = JSONL.rows(source, Problems())
    return [record.value for record in islice(records, _ROWS)]


def _repeated(names: Iterable[str]) -> int:
    counts = Counter(names)
    return sum(n for n in counts.values() if n > 1)


def _counted(values: Iterable[Any]) -> dict[Any, int]:
    counts = Counter(values)
    return dict(sorted(counts.items()))


def _spread(values: Sequence[int]) -> dict[str, float]:
    values = values or [0]
    return {
        "minimum": min(values),
        "median": median(values),
        "mean": mean(values),
        "maximum": max(values),
    }
