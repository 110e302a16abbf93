"""BEIR folders: ``corpus.jsonl``, ``queries.jsonl``, ``qrels/{train,dev,test}.tsv``. Files may be compressed.

The qrels files define the splits. A document with a score above 0 is gold, and the score is its grade. A line of a
qrels file is ``query-id, corpus-id, score`` (with tabs) or, in TREC's format, ``query-id, 0, corpus-id, score`` (with
tabs or spaces). All lines of a file have the same format.

Source: Thakur et al., BEIR, arXiv 2104.08663.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from leret.config.data import FileSettings
from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.formats.base import HUB, text, whole_number
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.records import BadRecord, LeftOut, Problems, Reader, Record, lines, records
from leret.datasets.splits import SPLITS, SplitName

_HEADER = re.compile(
    r"(query|q|topic)[-_]?(id)?\s((iter(ation)?|q0|0)\s)?(corpus|doc(ument)?|passage|p)[-_]?(id|no)"
    r"\s(score|rel(evance)?|label|grade)",
    re.IGNORECASE,
)
_LAYOUT = "kind beir needs a folder with corpus.jsonl, queries.jsonl and qrels/"


class BeirReader(Reader):
    """Reads a BEIR folder."""

    brings_documents = True

    def tasks(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        folder = Path(data.questions)
        judged, ids = _judgements(folder, problems), set[str]()
        for record in records(_file(folder, "queries.jsonl"), problems):
            with problems.at(record.place):
                id, query = text(record.value, "_id", "id"), text(record.value, "text")
                ids.add(id)
                if id not in judged:
                    continue
                split, grades = judged[id]
                gold = {doc_id: grade for doc_id, grade in grades.items() if grade > 0}
                if not gold:
                    raise LeftOut("query without a score above 0")
                relevance = gold if set(gold.values()) - {1} else {}
                yield record, Task.question(id, query, gold=gold, split=split, relevance=relevance)
        for id in judged:
            if id not in ids:
                fault = f"query {id!r} in qrels/ is not in queries.jsonl"
                problems.add(str(folder), BadRecord("no such query", fault))

    def documents(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Document]]:
        source = data.corpus or data.questions
        if not source.startswith(HUB) and not Path(source).is_file():
            source = str(_file(Path(source), "corpus.jsonl"))
        yield from JSONL.documents(data.model_copy(update={"corpus": source}), problems)


def _judgements(folder: Path, problems: Problems) -> dict[str, tuple[SplitName, dict[str, int]]]:
    """Map each judged query to the first of train, dev and test that judges it, and to its grades there."""
    judgements: dict[str, tuple[SplitName, dict[str, int]]] = {}
    for path, split in _qrels(folder, problems).items():
        width = 0  # number of columns
        for number, line in lines(path, problems, "\r\n"):
            cells = line.split("\t") if "\t" in line else line.split()
            if not width and _HEADER.fullmatch(line):
                width = len(cells)
                continue
            with problems.at(f"{path}:{number}"):
                query, doc_id, grade = _judgement(line, cells, width)
                width = len(cells)
                first, grades = judgements.setdefault(query, (split, {}))
                if first != split:
                    raise LeftOut("query judged in an earlier split")
                if grades.setdefault(doc_id, grade) != grade:
                    fault = f"query {query!r} and document {doc_id!r} have two scores, {grades[doc_id]} and {grade}"
                    raise BadRecord("two scores", f"{fault}; remove one")
    return judgements


def _judgement(line: str, cells: list[str], width: int) -> tuple[str, str, int]:
    """Return the query id, the document id and the score of a line in BEIR's or TREC's format.

    ``width`` is the number of columns of the lines before, if any.
    """
    n = len(cells)
    is_numbered = n > 2 and cells[1].strip().lower() in ("0", "q0")
    is_beir = n == 3 and "\t" in line and (width == n or not is_numbered)
    is_trec = n == 4 and is_numbered
    score = whole_number(cells[-1])
    if not (is_beir or is_trec) or width not in (0, n) or score is None or not all(map(str.strip, cells)):
        fault = f"{line[:60]!r} is not query-id, corpus-id and a whole number, separated by tabs"
        advice = "or TREC's query-id, 0, corpus-id and a whole number; use one format, and BEIR's header or none"
        raise BadRecord("broken qrels", f"{fault}, {advice}")
    return cells[0], cells[-2], score


def _qrels(folder: Path, problems: Problems) -> dict[Path, SplitName]:
    """Return the split of each qrels file, in the order train, dev, test."""
    files: dict[Path, SplitName] = {}
    for split in ("train", "dev", "test"):
        path = _only(folder / "qrels", [f"{alias}.tsv" for alias, name in SPLITS.items() if name == split])
        if path:
            files[path] = SPLITS[split]
    if not files:
        raise DataError(f"{folder} has no qrels/train.tsv, dev.tsv or test.tsv; {_LAYOUT}")
    for path in folder.glob("qrels/[!.]*"):
        if path not in files:
            problems.left_out[f"file qrels/{path.name}, not named after a split"] += 1
    return files


def _file(folder: Path, name: str) -> Path:
    path = _only(folder, [name])
    if path is None:
        raise DataError(f"{folder} has no {name}; {_LAYOUT}")
    return path


def _only(folder: Path, names: list[str]) -> Path | None:
    """Return the file with one of the names, which may be compressed. DataError if there are two."""
    paths = [folder / f"{name}{end}" for name in names for end in ("", ".gz", ".zst", ".bz2")]
    files = [path for path in paths if path.is_file()]
    if len(files) > 1:
        raise DataError(f"{files[0]} and {files[1].name} are the same part of the data; remove one of them")
    return files[0] if files else None
