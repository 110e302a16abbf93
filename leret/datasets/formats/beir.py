"""BEIR folders: ``corpus.jsonl``, ``queries.jsonl``, ``qrels/{train,dev,test}.tsv``.

Files may be compressed.

The qrels files define the splits. A document with a score above 0 is gold, and the score is its
grade. A line of a qrels file is ``query-id, corpus-id, score`` (with tabs) or, in TREC's format,
``query-id, 0, corpus-id, score`` (with tabs or spaces). All lines of a file have the same format.

Source: Thakur et al., BEIR, arXiv 2104.08663.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from leret.config.data import FileSettings
from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.formats.base import HUB, text
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.records import BadRecord, LeftOut, Problems, Reader, Record, lines, records
from leret.datasets.splits import SPLITS, SplitName

_HEADER = re.compile(
    r"(query|q|topic)[-_]?(id)?\s((iter(ation)?|q0|0)\s)?(corpus|doc(ument)?|passage|p)[-_]?(id|no)"
    r"\s(score|rel(evance)?|label|grade)",
    re.IGNORECASE,
)
_BEIR = re.compile(r"([^\t]*\S[^\t]*)\t([^\t]*\S[^\t]*)\t\s*(-?[0-9]{1,18})\s*")
# without a header, "0" may be TREC's second column
_HEADLESS = re.compile(rf"(?!.*\tq?0\t){_BEIR.pattern}", re.IGNORECASE)
_TREC = re.compile(r"(\S+)\s+q?0\s+(\S+)\s+(-?[0-9]{1,18})\s*", re.IGNORECASE)
_LAYOUT = "kind beir needs a folder with corpus.jsonl, queries.jsonl and qrels/"


class BeirReader(Reader):
    """Reads a BEIR folder."""

    brings_documents = True

    def tasks(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        folder = Path(data.questions)
        judged = _judgements(folder, problems)
        ids: set[str] = set()
        for record in records(_file(folder, "queries.jsonl"), problems):
            with problems.at(record.place):
                id = text(record.value, "_id", "id")
                query = text(record.value, "text")
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

    def documents(
        self, data: FileSettings, problems: Problems
    ) -> Iterator[tuple[Record, Document]]:
        source = data.corpus or data.questions
        if not source.startswith(HUB) and not Path(source).is_file():
            source = str(_file(Path(source), "corpus.jsonl"))
        yield from JSONL.documents(data.model_copy(update={"corpus": source}), problems)


def _judgements(folder: Path, problems: Problems) -> dict[str, tuple[SplitName, dict[str, int]]]:
    """Map each judged query to its grades and the first of train, dev and test that judges it."""
    judgements: dict[str, tuple[SplitName, dict[str, int]]] = {}
    for path, split in _qrels(folder, problems).items():
        forms = [_HEADLESS, _TREC]  # the first line decides
        for number, line in lines(path, problems, "\r\n"):
            if len(forms) > 1 and _HEADER.fullmatch(line):
                forms = [_BEIR] if line.count("\t") == 2 else [_TREC]
                continue
            with problems.at(f"{path}:{number}"):
                matches = [form.fullmatch(line) for form in forms]
                match = next(filter(None, matches), None)
                if match is None:
                    fault = "is not query-id, corpus-id and a whole number, separated by tabs"
                    advice = (
                        "or TREC's query-id, 0, corpus-id and a whole number; use one format, "
                        "and BEIR's header or none"
                    )
                    raise BadRecord("broken qrels", f"{line[:60]!r} {fault}, {advice}")
                forms = [_TREC if match.re is _TREC else _BEIR]
                query = match[1]
                doc_id = match[2]
                grade = int(match[3])
                first_split, grades = judgements.setdefault(query, (split, {}))
                if first_split != split:
                    raise LeftOut("query judged in an earlier split")
                first_grade = grades.setdefault(doc_id, grade)
                if first_grade != grade:
                    pair = f"query {query!r} and document {doc_id!r}"
                    fault = f"{pair} have two scores, {first_grade} and {grade}; remove one"
                    raise BadRecord("two scores", fault)
    return judgements


def _qrels(folder: Path, problems: Problems) -> dict[Path, SplitName]:
    """Return the split of each qrels file, in the order train, dev, test."""
    files: dict[Path, SplitName] = {}
    for split in ("train", "dev", "test"):
        names = [f"{alias}.tsv" for alias, name in SPLITS.items() if name == split]
        path = _only(folder / "qrels", names)
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
    """Return the file with one of the names, which may be compressed.

    DataError if there are two.
    """
    files: list[Path] = []
    for name in names:
        paths = [folder / f"{name}{suffix}" for suffix in ("", ".gz", ".zst", ".bz2")]
        files += [path for path in paths if path.is_file()]
    if len(files) > 1:
        raise DataError(
            f"{files[0]} and {files[1].name} are the same part of the data; remove one of them"
        )
    return files[0] if files else None
