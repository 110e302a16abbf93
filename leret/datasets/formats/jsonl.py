"""leret's own JSON lines, and their near kin.

Questions: ``{"id", "question", "answer", "relevant_doc_ids"}``, and where known ``type``, ``hops``, ``split``, and
``relevance``, the grades of the relevant documents by id;
``query`` is taken for ``question``; without an ``id``, the digest of the text is one. Corpora: ``{"doc_id", "title",
"text"}``; ``_id`` and ``id`` are taken for ``doc_id``, and a title may be missing. Other fields are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from leret.core.types import Document, Task, digest
from leret.datasets.formats.base import Format, grades, optional_number, optional_text, sentences, text, text_list
from leret.datasets.records import BadRecord

SPLITS: Mapping[str, str] = {
    "train": "train",
    "training": "train",
    "dev": "dev",
    "val": "dev",
    "valid": "dev",
    "validation": "dev",
    "test": "test",
}
"""What data sets call their splits, and what leret does."""


def _question(record: Mapping[str, Any]) -> Task:
    question = text(record, "question", "query")
    split = optional_text(record, "split")
    if split is not None and split not in SPLITS:
        raise BadRecord("unknown split", f"field 'split' is {split!r}; it should be train, dev or test")
    gold = text_list(record, "relevant_doc_ids")
    return Task.question(
        id=text(record, "id") if "id" in record else digest(question),
        text=question,
        answer=optional_text(record, "answer"),
        gold=gold,
        type=optional_text(record, "type"),
        hops=optional_number(record, "hops"),
        split=SPLITS[split] if split else None,
        relevance=grades(record, "relevance", gold),
    )


def _documents(record: Mapping[str, Any]) -> Iterable[Document]:
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


JSONL = Format("jsonl", _question, _documents)
