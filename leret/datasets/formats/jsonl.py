"""leret's JSON lines, and tables (CSV, Parquet) with the same fields.

Tasks: ``{"id", "question", "relevant_doc_ids", "answer"}``, and optionally ``answers`` (several),
``type``, ``hops``, ``split`` and ``relevance`` (grades of the relevant documents by id). A mapping
``inputs`` holds more inputs, or all of them. ``query`` is an alias of ``question``. ``id`` defaults
to the digest of the inputs. Corpora: ``{"doc_id", "title", "text"}``; ``_id`` and ``id`` are
aliases of ``doc_id``, and ``title`` is optional. A chunk also has ``parent``, the id of its
document. Other fields are ignored.

Ids may be whole numbers. ``relevant_doc_ids`` is one id, a list, or a text with several ids (see
`leret.datasets.load`). ``answer`` and ``answers`` are one text or a list; in a CSV file, a list is
written as JSON. A blank answer is no reference answer. Questions that are marked as unanswerable
are left out.

Kind ``chunks`` holds tasks with candidates to pick: ``{"id", "question", "chunks": [...],
"support": [...], "answer"}``. A chunk is ``{"id", "title", "text"}`` or a string, whose id is its
index (from 0). ``support`` lists indices or ids of the gold chunks. The task's inputs are
``question`` and ``chunks``. Other fields are as above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import leret.datasets.formats.base as field
from leret.core.types import Document, Task, digest
from leret.datasets.formats.base import Fields, FileReader
from leret.datasets.records import BadRecord


def _task(record: Fields) -> Task:
    inputs = _inputs(record)
    gold = field.text_list(record, "relevant_doc_ids")
    answers = field.answers(record, "answer", "answers")
    if not gold and not answers:
        fault = "no 'relevant_doc_ids', 'answer' or 'answers' to score against"
        raise BadRecord("missing field", f"{fault}; the fields are {field.names_in(record)}")
    if "id" in record:
        id = field.text(record, "id")
    elif len(inputs) == 1:
        id = digest(*inputs.values())
    else:
        id = digest(inputs)
    return Task(
        id=id,
        inputs=inputs,
        gold=gold,
        answers=answers,
        type=field.optional_text(record, "type"),
        hops=field.optional_number(record, "hops"),
        split=field.split(record),
        relevance=_grades(record, gold),
    )


def _inputs(record: Fields) -> dict[str, Any]:
    inputs = record.get("inputs") or {}
    if not isinstance(inputs, Mapping):
        raise field.wrong("inputs", inputs, "an object with the program's inputs by name")
    if inputs and not ("question" in record or "query" in record):
        return dict(inputs)
    if "question" in inputs:
        raise BadRecord(
            "field twice", "'question' is both in the record and in its 'inputs'; remove one"
        )
    return {"question": field.text(record, "question", "query"), **inputs}


def _grades(record: Fields, gold: Sequence[str]) -> dict[str, int]:
    value = record.get("relevance") or {}
    if not isinstance(value, Mapping):
        raise field.wrong("relevance", value, "whole numbers by document id")
    for doc_id, grade in value.items():
        is_number = isinstance(grade, int) and not isinstance(grade, bool)
        is_relevant = doc_id in gold
        if not is_number or (grade > 0) != is_relevant:
            raise field.wrong(
                f"relevance.{doc_id}", grade, "a whole number, above 0 only for relevant documents"
            )
    if set(value.values()) == {1}:
        return {}
    return dict(value)


def _documents(record: Fields) -> Iterable[Document]:
    if "relevant_doc_ids" in record:
        raise BadRecord(
            "no documents", "this is a question, not a document; set data.corpus to the corpus file"
        )
    doc_id = field.text(record, "doc_id", "_id", "id")
    title = field.optional_text(record, "title") or ""
    if "text" not in record:
        field.text(record, "text")  # raises with the available fields
    if isinstance(record["text"], list):
        body = field.sentences(record["text"], doc_id)
    else:
        body = field.optional_text(record, "text") or ""
    if not (body or title).strip():
        raise BadRecord(
            "empty field", f"field 'text' of document {doc_id!r} is empty, and it has no title"
        )
    parent = field.optional_text(record, "parent")
    yield Document(doc_id, title, body, parent)


def _with_chunks(record: Fields) -> Task:
    chunks = record.get("chunks")
    if not isinstance(chunks, list) or not chunks:
        raise field.wrong(
            "chunks", chunks, "a list of texts, or of objects with id, title and text"
        )
    if "relevant_doc_ids" in record:
        raise BadRecord("field twice", "gold chunks are in 'support'; remove 'relevant_doc_ids'")
    texts = []
    ids = []
    for i, value in enumerate(chunks):
        chunk = _chunk(value, i)
        texts.append(chunk)
        ids.append(str(i) if isinstance(chunk, str) else chunk["id"])
    if len(set(ids)) < len(ids):
        raise BadRecord("duplicate id", "two of the 'chunks' have the same id; make ids unique")
    support = record.get("support") or []
    if not isinstance(support, list):
        raise field.wrong("support", support, "a list of indices or ids of chunks")
    gold = []
    for item in support:
        is_index = type(item) is int and 0 <= item < len(ids)
        doc_id = ids[item] if is_index else item
        if doc_id not in ids:
            expected = f"the id of a chunk, or an index from 0 to {len(ids) - 1}"
            raise field.wrong("support", doc_id, expected)
        gold.append(doc_id)
    task = _task({**record, "relevant_doc_ids": gold})
    return replace(task, inputs={**task.inputs, "chunks": texts})


def _chunk(chunk: Any, index: int) -> str | dict[str, str]:
    if isinstance(chunk, str):
        return field.text({"chunks": chunk}, "chunks")
    if not isinstance(chunk, Mapping):
        raise field.wrong("chunks", chunk, "a list of texts, or of objects with id, title and text")
    id = str(index) if chunk.get("id") is None else field.text(chunk, "id")
    title = field.optional_text(chunk, "title") or ""
    return {"id": id, "title": title, "text": field.text(chunk, "text")}


def no_documents(record: Fields) -> Iterable[Document]:
    """Refuse a corpus for a kind that has candidates in each task."""
    raise BadRecord(
        "no documents",
        "this kind has no corpus, because chunks are task inputs; remove data.corpus",
    )


JSONL = FileReader(_task, _documents, marks=("relevant_doc_ids", "doc_id"))
CHUNKS = FileReader(_with_chunks, no_documents, marks=("chunks",))
