"""HotpotQA's official files: distractor and fullwiki, train and dev.

``{"_id", "question", "answer", "supporting_facts": [[title, sentence], ...], "context": [[title, [sentence, ...]],
...], "type", "level"}``; the tables of the hub (``id``, columns of lists) as well. A document's id is its title,
which is unique in HotpotQA's Wikipedia.

Source: Yang et al., HotpotQA, arXiv 1809.09600.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from leret.core.types import Document, Task
from leret.datasets.formats.base import Format, optional_number, optional_text, rows, sentences, text
from leret.datasets.records import BadRecord


def gold_titles(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Titles of the supporting facts, each one once, in order."""
    titles = [title for title, _ in rows(record, "supporting_facts", "title", "sent_id")]
    if not titles:
        raise BadRecord("no gold", "field 'supporting_facts' is empty: a question needs gold documents to be scored")
    if not all(isinstance(title, str) and title for title in titles):
        raise BadRecord("wrong type", f"field 'supporting_facts' holds {titles[0]!r} where a title should be")
    return tuple(dict.fromkeys(titles))


def context_documents(record: Mapping[str, Any]) -> Iterable[Document]:
    """Documents of a question's context; a record of a corpus by titles is one document itself."""
    if "context" not in record and "text" in record:
        title = text(record, "title")
        yield Document(title, title, sentences(record["text"], title))
        return
    for title, body in rows(record, "context", "title", "sentences"):
        if not isinstance(title, str) or not title:
            raise BadRecord("wrong type", f"field 'context' holds {title!r} where a title should be")
        yield Document(title, title, sentences(body, title))


def _question(record: Mapping[str, Any]) -> Task:
    return Task.question(
        id=text(record, "_id", "id"),
        text=text(record, "question"),
        answer=optional_text(record, "answer"),
        gold=gold_titles(record),
        type=optional_text(record, "type"),
        hops=optional_number(record, "hops") or 2,
    )


HOTPOTQA = Format("HotpotQA", _question, context_documents, shared=True)
