"""What a data set holds: the figures behind `leret data inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from leret.core.types import Task, digest
from leret.datasets.corpus import Corpus
from leret.datasets.load import load, load_questions, split_name
from leret.datasets.records import Problems


@dataclass(frozen=True, slots=True)
class Spread:
    """How a quantity is spread; all 0 where there is nothing to measure."""

    minimum: float
    median: float
    mean: float
    maximum: float


@dataclass(frozen=True, slots=True)
class DataReport:
    """Figures of a data set.

    Attributes:
        n_documents: in the corpus; 0 where it has none or was not given.
        corpus_digest: names the corpus; None where there is none.
        n_questions: that could be read.
        splits: questions by split, the data set's own or by hash.
        own_splits: the data set brings its splits.
        types: questions by type; ``unknown`` where there is none.
        hops: questions by hops, 0 where unknown.
        gold: questions by number of gold documents.
        question_words: words a question.
        document_words: words a document, title included.
        n_unused_documents: documents that are no question's gold.
        duplicate_questions: questions whose text another one has.
        duplicate_documents: documents whose text another one has.
        skipped: bad records of questions (gold that is not in the corpus among them) and corpus, by kind of fault.
        problems: the first bad records, one line each.
        examples: the first questions.
    """

    n_documents: int
    corpus_digest: str | None
    n_questions: int
    splits: Mapping[str, int]
    own_splits: bool
    types: Mapping[str, int]
    hops: Mapping[int, int]
    gold: Mapping[int, int]
    question_words: Spread
    document_words: Spread
    n_unused_documents: int
    duplicate_questions: int
    duplicate_documents: int
    skipped: Mapping[str, int]
    problems: tuple[str, ...]
    examples: tuple[Task, ...]


def inspect(
    kind: str,
    questions: str | None = None,
    corpus: str | None = None,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    skip_invalid: bool = True,
    n_examples: int = 3,
) -> DataReport:
    """Look through a data set.

    Args:
        kind: as in `leret.datasets.load.load`.
        questions: path, or ``hf:NAME``; None for kind world.
        corpus: path, or ``hf:NAME``; None as in `leret.datasets.load.load`, and looks at the questions alone where
            they bring no documents.
        seed: of the splits, and of the generated world.
        options: of the generator, for kind world.
        skip_invalid: report bad records; off, refuse them as a stage would.
        n_examples: questions shown.

    Raises:
        DataError: a file as a whole cannot be read, not one record of it can, or some cannot without ``skip_invalid``.
    """
    texts, problems = None, Problems()
    if corpus is None and kind in {"jsonl", "hover"}:
        loaded = load_questions(kind, questions, seed=seed, skip_invalid=skip_invalid, options=options)
    else:
        data = load(kind, questions, corpus, seed=seed, skip_invalid=skip_invalid, options=options)
        loaded, texts, problems = data.questions, data.corpus, data.problems
    used = {doc_id for question in loaded for doc_id in question.gold}
    documents = () if texts is None else tuple(texts)
    lengths, repeated = _documents(texts)
    return DataReport(
        n_documents=len(documents),
        corpus_digest=None if texts is None else texts.digest,
        n_questions=len(loaded),
        splits=_counted(split_name(question, seed) for question in loaded),
        own_splits=any(question.split for question in loaded),
        types=_counted(question.type or "unknown" for question in loaded),
        hops=_counted(question.hops or 0 for question in loaded),
        gold=_counted(len(question.gold) for question in loaded),
        question_words=_spread([len(question.text.split()) for question in loaded]),
        document_words=_spread(lengths),
        n_unused_documents=sum(doc_id not in used for doc_id in documents),
        duplicate_questions=_repeated(digest(question.text) for question in loaded),
        duplicate_documents=repeated,
        skipped=dict(Counter(loaded.skipped) + problems.kinds),
        problems=(*loaded.problems, *problems.shown),
        examples=loaded.items[:n_examples],
    )


def _documents(corpus: Corpus | None) -> tuple[list[int], int]:
    """Words of each document, and how many have another one's text; one text in memory at a time."""
    lengths: list[int] = []

    def texts() -> Iterable[str]:
        for document in corpus.values() if corpus is not None else ():
            lengths.append(len(document.title.split()) + len(document.text.split()))
            yield digest(document.text)

    return lengths, _repeated(texts())


def _repeated(names: Iterable[str]) -> int:
    return sum(n for n in Counter(names).values() if n > 1)


def _counted(values: Iterable[Any]) -> dict[Any, int]:
    return dict(sorted(Counter(values).items()))


def _spread(values: Sequence[int]) -> Spread:
    if not values:
        return Spread(0, 0, 0, 0)
    return Spread(min(values), median(values), mean(values), max(values))
