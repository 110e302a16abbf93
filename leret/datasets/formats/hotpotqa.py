"""HotpotQA's official files and those in its layout: HoVer's and 2WikiMultihopQA's.

HotpotQA: ``{"_id", "question", "answer", "supporting_facts": [[title, sentence], ...], "context": [[title, [sentence,
...]], ...], "type", "level"}``; the tables of the hub (``id``, columns of lists) as well. A document's id is its title,
which is unique in HotpotQA's Wikipedia. 2WikiMultihopQA's types are comparison, bridge_comparison, inference and
compositional; its hops are the gold documents. HoVer: ``{"uid", "claim", "supporting_facts", "label", "num_hops"}``;
the claim stands for the question and the label for the answer; it brings no documents, and searches HotpotQA's corpus.

Sources: Yang et al., HotpotQA, arXiv 1809.09600; Ho et al., 2WikiMultihopQA, arXiv 2011.01060; Jiang et al., HoVer,
arXiv 2011.03088.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from leret.core.types import Document, Task
from leret.datasets.formats.base import Fields, FileReader, optional_number, optional_text, rows, sentences, text
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.records import BadRecord


def _gold(record: Fields) -> tuple[str, ...]:
    """Titles of the supporting facts, each one once, in order."""
    titles = [title for title, _ in rows(record, "supporting_facts", "title", "sent_id")]
    if not titles:
        raise BadRecord("no gold", "field 'supporting_facts' is empty: a question needs gold documents to be scored")
    if not all(isinstance(title, str) and title for title in titles):
        raise BadRecord("wrong type", f"field 'supporting_facts' holds {titles[0]!r} where a title should be")
    return tuple(dict.fromkeys(titles))


def _documents(record: Fields) -> Iterable[Document]:
    """Documents of a question's context; a record of a corpus by titles is one document itself."""
    if "claim" in record:
        raise BadRecord("no documents", "a HoVer file holds no documents; give HotpotQA's corpus as data.corpus")
    if "context" not in record and "text" in record:
        title = text(record, "title")
        yield Document(title, title, sentences(record["text"], title))
        return
    for title, body in rows(record, "context", "title", "sentences"):
        if not isinstance(title, str) or not title:
            raise BadRecord("wrong type", f"field 'context' holds {title!r} where a title should be")
        yield Document(title, title, sentences(body, title))


def _hotpotqa(record: Fields) -> Task:
    return Task.question(
        id=text(record, "_id", "id"),
        text=text(record, "question"),
        answer=optional_text(record, "answer"),
        gold=_gold(record),
        type=optional_text(record, "type"),
        hops=optional_number(record, "hops") or 2,
    )


def _two_wiki(record: Fields) -> Task:
    task = _hotpotqa(record)
    return replace(task, hops=len(task.gold))


def _hover(record: Fields) -> Task:
    label = optional_text(record, "label") if isinstance(record.get("label"), str) else None
    return Task.question(
        id=text(record, "uid"),
        text=text(record, "claim"),
        answer=label,
        gold=_gold(record),
        type=label,
        hops=optional_number(record, "num_hops"),
    )


HOTPOTQA = FileReader(_hotpotqa, _documents, ("supporting_facts",), True, repeats_documents=True, own=JSONL)
TWO_WIKI = FileReader(_two_wiki, _documents, ("evidences", "evidences_id"), True, repeats_documents=True, own=JSONL)
HOVER = FileReader(_hover, _documents, ("claim",), repeats_documents=True, own=JSONL)
