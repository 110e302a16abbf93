"""leret's own JSON lines, and their near kin.

Tasks: ``{"id", "question", "relevant_doc_ids", "answer"}``, and where known ``answers`` (several), ``type``, ``hops``,
``split`` and ``relevance``, the grades of the relevant documents by id. ``inputs``, a mapping by name, stands beside
``question`` or instead of it; ``query`` is taken for ``question``; without an ``id``, the digest of the inputs is one.
Corpora: ``{"doc_id", "title", "text"}``; ``_id`` and ``id`` are taken for ``doc_id``, and a title may be missing.
Other fields are left alone.

Kind ``chunks``, tasks that bring what may be picked: ``{"id", "question", "chunks": [...], "support": [...],
"answer"}``. A chunk is a text, whose id is its place from 0 as text, or ``{"id", "title", "text"}``; ``support`` names
places or ids. The task's inputs are ``question`` and ``chunks``, in their order; its gold documents are the ids of the
supporting ones. The other fields are as above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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


def _with_chunks(record: Fields) -> Task:
    chunks = record.get("chunks")
    if not isinstance(chunks, list) or not chunks:
        raise wrong("chunks", chunks, "a list of texts, or of objects with id, title and text")
    shown = [_chunk(chunk, place) for place, chunk in enumerate(chunks)]
    ids = [str(place) if isinstance(chunk, str) else chunk["id"] for place, chunk in enumerate(shown)]
    if len(set(ids)) < len(ids):
        raise BadRecord("duplicate id", "two of 'chunks' have one id; ids name one chunk each")
    support = record.get("support") or []
    if not isinstance(support, list):
        raise wrong("support", support, "places or ids of chunks")
    gold = [ids[s] if type(s) is int and 0 <= s < len(ids) else s for s in support]
    for named in gold:
        if named not in ids:
            raise wrong("support", named, f"places from 0 to {len(ids) - 1}, or ids, of chunks")
    task = _task({**record, "relevant_doc_ids": gold})
    return replace(task, inputs={**task.inputs, "chunks": shown})


def _chunk(chunk: Any, place: int) -> str | dict[str, str]:
    if isinstance(chunk, str):
        return chunk
    if not isinstance(chunk, Mapping):
        raise wrong("chunks", chunk, "texts, or objects with id, title and text")
    title = chunk.get("title") or ""
    return {"id": str(chunk.get("id", place)), "title": str(title), "text": text(chunk, "text")}


def no_documents(record: Fields) -> Iterable[Document]:
    """Of a kind whose tasks bring what may be picked."""
    raise BadRecord("no documents", "the chunks of a task are its inputs, and no corpus; leave out data.corpus")


JSONL = FileReader(_task, _documents, marks=("relevant_doc_ids", "doc_id"))
CHUNKS = FileReader(_with_chunks, no_documents, marks=("chunks",))
