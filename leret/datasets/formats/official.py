"""Official files of HotpotQA, 2WikiMultihopQA, HoVer, and MuSiQue.

HotpotQA (arXiv 1809.09600): ``{"_id", "question", "answer", "supporting_facts": [[title, sentence],
...], "context": [[title, [sentence, ...]], ...], "type", "level"}``, or rows from the Hugging Face
Hub (``id``; columns are lists). A document's id is its title, which is unique in HotpotQA's
Wikipedia. If a title has two texts, the first one in the file counts, and the others are counted in
a message.

2WikiMultihopQA (arXiv 2011.01060): HotpotQA's layout with the types comparison, bridge_comparison,
inference and compositional. ``hops`` is the number of gold documents.

HoVer (arXiv 2011.03088): ``{"uid", "claim", "supporting_facts", "label", "num_hops"}``. The claim
is the question and the label is the answer (on the Hugging Face Hub, its number: 1 for SUPPORTED).
HoVer has no documents; it uses HotpotQA's corpus.

MuSiQue (arXiv 2108.00573), JSON lines: ``{"id", "question", "answer", "answer_aliases",
"paragraphs": [{"idx", "title", "paragraph_text", "is_supporting"}, ...],
"question_decomposition"}``. An article has several paragraphs, so a document's id is ``title #``
and six digits of its text's digest. The id is the same in all files. A question without supporting
paragraphs is a bad record. Questions that are not ``answerable`` are left out and counted.

Kind ``episodes``: questions of HotpotQA, 2WikiMultihopQA and MuSiQue with their paragraphs as
``chunks``. Chunk ids are the document ids of the kinds ``hotpotqa``, ``2wiki`` and ``musique``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import leret.datasets.formats.base as field
from leret.core.types import Document, Task, digest
from leret.datasets.formats.base import Fields, FileReader
from leret.datasets.formats.jsonl import JSONL, no_documents
from leret.datasets.records import BadRecord

_LABELS = {
    "SUPPORTED": "SUPPORTED",
    "1": "SUPPORTED",
    "NOT_SUPPORTED": "NOT_SUPPORTED",
    "0": "NOT_SUPPORTED",
}
_NO_LABEL = {"-1", "None", ""}  # in the test set


def _titles(record: Fields) -> tuple[str, ...]:
    titles = [title for title, _ in field.rows(record, "supporting_facts", "title", "sent_id")]
    if not titles:
        raise BadRecord(
            "no gold", "field 'supporting_facts' is empty; add the titles of the gold documents"
        )
    for title in titles:
        _check_title(title, "supporting_facts")
    return tuple(dict.fromkeys(titles))


def _check_title(title: object, name: str) -> None:
    """Raise BadRecord if a title in the field ``name`` is not a non-blank text."""
    if not isinstance(title, str) or not title.strip():
        raise BadRecord("wrong type", f"field {name!r} has {title!r} in place of a title")


def _articles(record: Fields) -> Iterable[Document]:
    """Yield the documents of a question's context, or the one document of a corpus record."""
    if "claim" in record:
        raise BadRecord(
            "no documents", "HoVer files have no documents; set data.corpus to HotpotQA's corpus"
        )
    if "context" not in record and "text" in record:
        title = field.text(record, "title")
        text = field.sentences(record["text"], title)
        yield Document(title, title, text)
        return
    for title, body in field.rows(record, "context", "title", "sentences"):
        _check_title(title, "context")
        text = field.sentences(body, title)
        yield Document(title, title, text)


def _hotpotqa(record: Fields) -> Task:
    return Task.question(
        id=field.text(record, "_id", "id"),
        text=field.text(record, "question"),
        answer=field.optional_text(record, "answer"),
        gold=_titles(record),
        type=field.optional_text(record, "type"),
        hops=field.optional_number(record, "hops") or 2,
    )


def _hover(record: Fields) -> Task:
    value = record.get("label")
    label = _LABELS.get(str(value))
    if label is None and str(value) not in _NO_LABEL:
        raise field.wrong("label", value, "SUPPORTED or NOT_SUPPORTED")
    hops = field.optional_number(record, "num_hops")
    id = field.text(record, "uid")
    claim = field.text(record, "claim")
    return Task.question(id, claim, label, _titles(record), label, hops)


def _paragraphs(record: Fields) -> list[tuple[Document, bool]]:
    value = record.get("paragraphs")
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        fault = "field 'paragraphs' should be a list of objects"
        raise BadRecord("missing field", f"{fault}; the fields are {field.names_in(record)}")
    documents = []
    for item in value:
        title = field.text(item, "title")
        body = field.text(item, "paragraph_text")
        is_gold = item.get("is_supporting", False)
        if not isinstance(is_gold, bool):
            raise field.wrong("is_supporting", is_gold, "true or false")
        doc_id = f"{title} #{digest(body)[:6]}"
        documents.append((Document(doc_id, title, body), is_gold))
    return documents


def _musique(record: Fields) -> Task:
    paragraphs = _paragraphs(record)
    gold = dict.fromkeys(document.doc_id for document, is_gold in paragraphs if is_gold)
    if not gold:
        raise BadRecord(
            "no gold", "no paragraph has 'is_supporting': true; mark the gold paragraphs"
        )
    steps = record.get("question_decomposition")
    hops = len(steps) if isinstance(steps, Sequence) and steps else len(gold)
    id = field.text(record, "id")
    question = field.text(record, "question")
    task = Task.question(id, question, gold=tuple(gold), type=f"{hops}hop", hops=hops)
    answers = field.answers(record, "answer", "answer_aliases")
    return replace(task, answers=answers)


def _episode(record: Fields) -> Task:
    readers = [reader for reader in (TWO_WIKI, MUSIQUE, HOTPOTQA) if reader.fits(record)]
    if not readers or not ("context" in record or "paragraphs" in record):
        fault = f"the question has no paragraphs (fields {field.names_in(record)})"
        advice = (
            "to add candidates from a corpus, run `leret data episodes`, which writes kind chunks"
        )
        raise BadRecord("no paragraphs", f"{fault}; {advice}")
    reader = readers[0]
    task = reader.task(record)
    chunks: dict[str, dict[str, str]] = {}
    for document in reader.in_record(record):
        chunk = {"id": document.doc_id, "title": document.title, "text": document.text}
        # as in a corpus, the first text of a title counts
        chunks.setdefault(document.doc_id, chunk)
    for doc_id in task.gold:
        if doc_id not in chunks:
            raise BadRecord("unknown gold", f"gold document {doc_id!r} is not among the paragraphs")
    return replace(task, inputs={**task.inputs, "chunks": list(chunks.values())})


_Official = partial(FileReader, repeats_documents=True, alternative=JSONL)
HOTPOTQA = _Official(_hotpotqa, _articles, ("supporting_facts",), brings_documents=True)
TWO_WIKI = _Official(
    lambda record: replace(_hotpotqa(record), hops=len(_titles(record))),
    *(_articles, ("evidences", "evidences_id")),
    brings_documents=True,
)
HOVER = _Official(_hover, _articles, ("claim",))
MUSIQUE = _Official(
    _musique,
    lambda record: [d for d, _ in _paragraphs(record)],
    ("paragraphs",),
    brings_documents=True,
)
EPISODES = FileReader(_episode, no_documents, marks=())
