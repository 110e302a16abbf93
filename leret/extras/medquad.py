"""MedQuAD: medical questions with answers from websites of the US National Institutes of Health.

``data.questions`` is a folder of the collections (``1_CancerGov_QA`` ...), or one of them. They
hold XML files: ``<Document id source url> <Focus/> <QAPairs> <QAPair pid> <Question qid qtype/>
<Answer/> ...``. Each answer is a document and the gold document of its question. Its id is the
collection's number and the ``qid`` (``1-0000001_1-2``), because collections use the same ids; its
title is the focus. Pairs without an answer are left out and counted (three collections lack answers
for copyright reasons). ``data.merge_questions`` merges questions that several websites answer.

Source: Ben Abacha and Demner-Fushman, A question-entailment approach to question answering, BMC
Bioinformatics 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# expat loads no external entities and bounds the growth of internal ones
from xml.etree import ElementTree

from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.formats.base import Fields, FileReader, optional_text, text
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.records import BadRecord, Problems, Record, open_compressed


class MedquadReader(FileReader):
    """Reads a folder of XML files.

    `data.corpus` may name another corpus with the same ids, as JSON lines.
    """

    def fits_folder(self, folder: Path) -> bool:
        return any(folder.rglob("*.xml"))

    def rows(self, source: str, problems: Problems) -> Iterator[Record]:
        folder = Path(source)
        if folder.is_dir():
            return _pairs(folder, problems)
        return super().rows(source, problems)


def _pairs(folder: Path, problems: Problems) -> Iterator[Record]:
    """Yield the pairs with an answer, as records with the fields of `_task` and `_document`."""
    number = 0
    for path in sorted(folder.rglob("*.xml")):
        try:
            with open_compressed(path) as file:
                document = ElementTree.parse(file).getroot()
        except ElementTree.ParseError as error:
            problems.add(str(path), BadRecord("broken XML file", f"broken XML ({error})"))
            continue
        focus = _words(document.find("Focus"))
        collection = path.parent.name.partition("_")[0]
        for pair in document.iter("QAPair"):
            question = pair.find("Question")
            answer = _words(pair.find("Answer"))
            place = f"{path}: pair {pair.get('pid', number + 1)}"
            if len(pair.findall("Question")) > 1 or len(pair.findall("Answer")) > 1:
                fault = "the pair has two questions or answers; remove one"
                problems.add(place, BadRecord("field twice", fault))
                continue
            if not answer:
                problems.left_out["no answer"] += 1
                continue
            number += 1
            attributes = {} if question is None else question.attrib
            qid = attributes.get("qid")
            value = {
                "id": f"{collection}-{qid}" if qid else None,
                "question": _words(question),
                "answer": answer,
                "type": attributes.get("qtype"),
                "focus": focus,
            }
            yield Record(place, number, value)
    if not number:
        raise DataError(
            f"{folder} has no XML file with a QAPair that has an answer; choose MedQuAD's folder"
        )


def _words(element: ElementTree.Element | None) -> str:
    if element is None:
        return ""
    content = "".join(element.itertext())
    return " ".join(content.split())


def _task(record: Fields) -> Task:
    id = text(record, "id")
    question = text(record, "question")
    answer = text(record, "answer")
    return Task.question(id, question, answer, (id,), optional_text(record, "type"))


def _document(record: Fields) -> list[Document]:
    id = text(record, "id")
    answer = text(record, "answer")
    return [Document(id, record["focus"], answer)]


MEDQUAD = MedquadReader(_task, _document, marks=(), brings_documents=True, alternative=JSONL)
