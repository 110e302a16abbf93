"""MuSiQue's official files: JSON lines, 2 to 4 hops, paragraphs with each question.

``{"id", "question", "answer", "answer_aliases", "paragraphs": [{"idx", "title", "paragraph_text", "is_supporting"},
...], "question_decomposition"}``. One article gives many paragraphs, so a title is no id: a document's id is ``title
#`` and six digits of its text's digest, the same in every file. A question that is not answerable has no gold to be
scored by, and counts as a bad record.

Source: Trivedi et al., MuSiQue, arXiv 2108.00573.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from leret.core.types import Document, Task, digest
from leret.datasets.formats.base import Fields, FileReader, optional_text, text, text_list
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.records import BadRecord


def _paragraphs(record: Fields) -> list[tuple[Document, bool]]:
    value = record.get("paragraphs")
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        there = ", ".join(map(repr, record))
        raise BadRecord("missing field", f"field 'paragraphs' should be a list of objects; the fields are {there}")
    return [(_document(item), bool(item.get("is_supporting"))) for item in value]


def _document(paragraph: Fields) -> Document:
    title, body = text(paragraph, "title"), text(paragraph, "paragraph_text")
    return Document(f"{title} #{digest(body)[:6]}", title, body)


def _documents(record: Fields) -> Iterable[Document]:
    return [document for document, _ in _paragraphs(record)]


def _task(record: Fields) -> Task:
    gold = dict.fromkeys(document.doc_id for document, supporting in _paragraphs(record) if supporting)
    if not gold:
        raise BadRecord("no gold", "no paragraph has 'is_supporting': a question needs gold documents to be scored")
    steps = record.get("question_decomposition")
    hops = len(steps) if isinstance(steps, Sequence) and steps else len(gold)
    answer = optional_text(record, "answer")
    return Task(
        id=text(record, "id"),
        inputs={"question": text(record, "question")},
        gold=tuple(gold),
        answers=tuple(dict.fromkeys([*([answer] if answer else []), *text_list(record, "answer_aliases")])),
        type=f"{hops}hop",
        hops=hops,
    )


MUSIQUE = FileReader(_task, _documents, ("paragraphs",), True, repeats_documents=True, own=JSONL)
