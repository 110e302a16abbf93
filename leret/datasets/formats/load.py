"""Questions and documents of any source, one after the other, with what is wrong in them collected."""

from __future__ import annotations

import unicodedata
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.formats.base import Format
from leret.datasets.formats.beir import beir_corpus, beir_questions
from leret.datasets.formats.hotpotqa import HOTPOTQA
from leret.datasets.formats.hover import HOVER
from leret.datasets.formats.hub import PREFIX, hub_records
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.formats.musique import MUSIQUE
from leret.datasets.formats.two_wiki import TWOWIKI
from leret.datasets.records import BadRecord, Problems, Record, records

FORMATS: Mapping[str, Format] = {
    "jsonl": JSONL,
    "beir": JSONL,
    "hotpotqa": HOTPOTQA,
    "hover": HOVER,
    "musique": MUSIQUE,
    "2wiki": TWOWIKI,
}


def read_questions(kind: str, source: str, problems: Problems, corpus: Container[str] | None = None) -> Iterator[Task]:
    """Questions of a file, a BEIR folder or a data set of the hub.

    Args:
        kind: of `FORMATS`. Files of the named sets may be in leret's own format: the first record's fields tell.
        source: path, or ``hf:NAME``.
        problems: takes bad records: unreadable, of an id seen before, of gold that is not in ``corpus``.
        corpus: ids of the documents; None checks no gold. A gold id that is there under another Unicode
            normalisation takes the corpus's form.

    Raises:
        DataError: the source as a whole cannot be read.
    """
    seen: dict[str, int] = {}
    for record, question in _questions(kind, source, problems):
        try:
            first = seen.setdefault(question.id, record.number)
            if first != record.number:
                raise BadRecord("duplicate id", f"id {question.id!r} was there before, at number {first}")
            yield question if corpus is None else _with_gold(question, corpus)
        except BadRecord as problem:
            problems.add(record.place, problem)


def read_documents(kind: str, source: str, problems: Problems) -> Iterator[Document]:
    """Documents of a corpus, or of the contexts in a file of questions.

    Args:
        kind: of `FORMATS`.
        source: path, or ``hf:NAME``.
        problems: takes bad records, and in a corpus (not in contexts) ids seen before.

    Raises:
        DataError: the source as a whole cannot be read.
    """
    if kind == "beir" and not source.startswith(PREFIX):
        source = str(beir_corpus(Path(source)))
    seen: dict[str, int] = {}
    form: Format | None = None
    for record in _records(source, problems):
        form = form or _format(kind, record.value)
        try:
            for document in form.documents(record.value):
                if document.doc_id not in seen:
                    seen[document.doc_id] = record.number
                    yield document
                elif not form.shared:
                    first = seen[document.doc_id]
                    raise BadRecord("duplicate id", f"document {document.doc_id!r} was there before, at number {first}")
        except BadRecord as problem:
            problems.add(record.place, problem)


def _questions(kind: str, source: str, problems: Problems) -> Iterator[tuple[Record, Task]]:
    if kind == "beir":
        if source.startswith(PREFIX):
            raise DataError(f"{source}: kind beir reads a folder on disk; download it, or use kind jsonl")
        yield from beir_questions(Path(source), problems)
        return
    form: Format | None = None
    for record in _records(source, problems):
        form = form or _format(kind, record.value)
        try:
            question = form.question(record.value)
        except BadRecord as problem:
            problems.add(record.place, problem)
        else:
            yield record, replace(question, split=question.split or record.split)


def _records(source: str, problems: Problems) -> Iterator[Record]:
    return hub_records(source) if source.startswith(PREFIX) else records(Path(source), problems)


def _format(kind: str, first: Mapping[str, Any]) -> Format:
    """Official files have neither of these fields; leret's own always have one."""
    return JSONL if "relevant_doc_ids" in first or "doc_id" in first else FORMATS[kind]


def _with_gold(question: Task, corpus: Container[str]) -> Task:
    """The question, its gold ids as the corpus writes them."""
    gold: dict[str, int] = {}
    for doc_id, grade in question.grades.items():
        forms = (doc_id, *(unicodedata.normalize(form, doc_id) for form in ("NFC", "NFD")))
        known = next((form for form in forms if form in corpus), None)
        if known is None:
            fault = f"gold document {doc_id!r} of question {question.id!r} is not in the corpus"
            raise BadRecord("unknown gold", fault)
        gold.setdefault(known, grade)
    return replace(question, gold=tuple(gold), relevance=gold if question.relevance else {})
