"""Tasks that bring what may be picked: any JSON lines with chunks, and the official files of multi-hop question sets.

A task's inputs are ``question`` and ``chunks``, in their order; its gold documents are the ids of the chunks that
support the answer.

Kind ``chunks``: ``{"id", "question", "chunks": [...], "support": [...], "answer"}``. A chunk is a text, whose id is its
place from 0 as text, or ``{"id", "title", "text"}``; ``support`` names places or ids. ``answers``, ``type``, ``hops``
and ``split`` are as of kind jsonl.
Kind ``episodes``: questions of HotpotQA, 2WikiMultihopQA and MuSiQue, their own paragraphs as chunks, with the ids that
the kinds ``hotpotqa``, ``2wiki`` and ``musique`` give them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from leret.core.types import Document, Task
from leret.datasets.formats.base import Fields, FileReader, text, wrong
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.formats.official import HOTPOTQA, MUSIQUE, TWO_WIKI
from leret.datasets.records import BadRecord

_OFFICIAL = (TWO_WIKI, MUSIQUE, HOTPOTQA)


def _task(record: Fields) -> Task:
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
    task = JSONL.task({**record, "relevant_doc_ids": gold})
    return replace(task, inputs={**task.inputs, "chunks": shown})


def _chunk(chunk: Any, place: int) -> str | dict[str, str]:
    if isinstance(chunk, str):
        return chunk
    if not isinstance(chunk, Mapping):
        raise wrong("chunks", chunk, "texts, or objects with id, title and text")
    title = chunk.get("title") or ""
    return {"id": str(chunk.get("id", place)), "title": str(title), "text": text(chunk, "text")}


def _episode(record: Fields) -> Task:
    reader = next((reader for reader in _OFFICIAL if reader.fits(record)), None)
    if reader is None or not ("context" in record or "paragraphs" in record):
        there = ", ".join(map(repr, record))
        mend = "make a file of kind chunks with `leret data episodes`, which takes candidates from a corpus"
        raise BadRecord("no paragraphs", f"the question brings no paragraphs (fields {there}); {mend}")
    task, documents = reader.task(record), {d.doc_id: d for d in reader.in_record(record)}
    if missing := [doc_id for doc_id in task.gold if doc_id not in documents]:
        raise BadRecord("unknown gold", f"gold document {missing[0]!r} is not among the paragraphs")
    chunks = [{"id": d.doc_id, "title": d.title, "text": d.text} for d in documents.values()]
    return replace(task, inputs={**task.inputs, "chunks": chunks})


def _no_documents(record: Fields) -> Iterable[Document]:
    raise BadRecord("no documents", "the chunks of a task are its inputs, and no corpus; leave out data.corpus")


CHUNKS = FileReader(_task, _no_documents, marks=("chunks",))
EPISODES = FileReader(_episode, _no_documents, marks=())
