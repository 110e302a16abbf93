"""leret's own JSON lines, and their near kin.

Tasks: ``{"id", "question", "relevant_doc_ids", "answer"}``, and where known ``answers`` (several), ``type``, ``hops``,
``split`` and ``relevance``, the grades of the relevant documents by id. ``inputs``, a mapping by name, stands beside
``question`` or instead of it; ``query`` is taken for ``question``; without an ``id``, the digest of the inputs is one.
Corpora: ``{"doc_id", "title", "text"}``; ``_id`` and ``id`` are taken for ``doc_id``, and a title may be missing.
Other fields are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from leret.core.types import Document, Task, digest
from leret.datasets.formats.base import (
    Fields,
    FileReader,
    optional_number,
    optional_text,
    sentences,
    text,
    text_list,
    wrong,
)
from leret.datasets.records import BadRecord
from leret.datasets.splits import SPLITS


def _task(record: Fields) -> Task:
    inputs = _inputs(record)
    split = optional_text(record, "split")
    if split is not None and split not in SPLITS:
        raise BadRecord("unknown split", f"field 'split' is {split!r}; it should be train, dev or test")
    gold = text_list(record, "relevant_doc_ids")
    answer = optional_text(record, "answer")
    answers = dict.fromkeys([*([] if answer is None else [answer]), *text_list(record, "answers")])
    if not gold and not answers:
        there = ", ".join(map(repr, record))
        fault = "neither 'relevant_doc_ids' nor 'answer' or 'answers' is given, so nothing can be scored"
        raise BadRecord("missing field", f"{fault}; the fields are {there}")
    return Task(
        id=text(record, "id") if "id" in record else digest(*inputs.values() if len(inputs) == 1 else [inputs]),
        inputs=inputs,
        gold=gold,
        answers=tuple(answers),
        type=optional_text(record, "type"),
        hops=optional_number(record, "hops"),
        split=SPLITS[split] if split else None,
        relevance=_grades(record, gold),
    )


def _inputs(record: Fields) -> dict[str, Any]:
    named = record.get("inputs") or {}
    if not isinstance(named, Mapping):
        raise wrong("inputs", named, "an object: the program's inputs by name")
    if named and not ("question" in record or "query" in record):
        return dict(named)
    if "question" in named:
        raise BadRecord("field twice", "'question' stands in the record and in its 'inputs'; leave one out")
    return {"question": text(record, "question", "query"), **named}


def _grades(record: Fields, gold: Sequence[str]) -> dict[str, int]:
    """Whole numbers by document, above 0 for gold alone; nothing where the field is absent, or all of them are 1."""
    value = record.get("relevance") or {}
    if not isinstance(value, Mapping):
        raise wrong("relevance", value, "whole numbers by document id")
    for doc_id, grade in value.items():
        if not isinstance(grade, int) or isinstance(grade, bool) or (grade > 0) != (doc_id in gold):
            raise wrong(f"relevance.{doc_id}", grade, "a whole number, above 0 for relevant documents alone")
    return dict(value) if set(value.values()) - {1} else {}


def _documents(record: Fields) -> Iterable[Document]:
    if "relevant_doc_ids" in record:
        raise BadRecord("no documents", "a question where a document should be; name the corpus as data.corpus")
    doc_id = text(record, "doc_id", "_id", "id")
    title = optional_text(record, "title") or ""
    if "text" not in record:
        text(record, "text")  # says what is missing
    body = sentences(record["text"], doc_id) if isinstance(record["text"], list) else optional_text(record, "text")
    if not (body or title).strip():
        raise BadRecord("empty field", f"field 'text' of document {doc_id!r} is empty, and it has no title")
    yield Document(doc_id, title, body or "")


JSONL = FileReader(_task, _documents, marks=("relevant_doc_ids", "doc_id"))
