"""BEIR folders: ``corpus.jsonl``, ``queries.jsonl``, ``qrels/{train,dev,test}.tsv``; any of them compressed.

The qrels are the data set's own splits. A judgement above 0 is gold, and its grade.

Source: Thakur et al., BEIR, arXiv 2104.08663.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from leret.core.errors import DataError
from leret.core.types import Task
from leret.datasets.formats.base import text
from leret.datasets.formats.jsonl import SPLITS
from leret.datasets.records import BadRecord, Problems, Record, lines, records

_SUFFIXES = ("", ".gz", ".zst", ".bz2")
_COLUMNS = 3
_LAYOUT = "kind beir reads a folder with corpus.jsonl, queries.jsonl and qrels/"


def beir_corpus(folder: Path) -> Path:
    """The corpus file of a folder; a path to a file is taken as it is.

    Raises:
        DataError: there is none.
    """
    return folder if folder.is_file() else _file(folder, "corpus.jsonl")


def beir_questions(folder: Path, problems: Problems) -> Iterator[tuple[Record, Task]]:
    """Judged queries of every split, with the records they come from.

    Raises:
        DataError: a file of the folder is missing or cannot be read.
    """
    judged = _judgements(folder, problems)
    for record in records(_file(folder, "queries.jsonl"), problems):
        try:
            query = Task.question(text(record.value, "_id", "id"), text(record.value, "text"))
        except BadRecord as problem:
            problems.add(record.place, problem)
            continue
        if query.id in judged:
            split, gold = judged.pop(query.id)
            relevance = gold if set(gold.values()) - {1} else {}
            yield record, replace(query, gold=tuple(gold), split=split, relevance=relevance)
    for id in judged:
        problems.add(str(folder), BadRecord("no such query", f"qrels judge {id!r}, which queries.jsonl does not hold"))


def _judgements(folder: Path, problems: Problems) -> dict[str, tuple[str, dict[str, int]]]:
    """Split and graded gold of every query that has any; one of two splits stays in the first (train, dev, test)."""
    found: dict[str, tuple[str, dict[str, int]]] = {}
    files = {SPLITS[path.name.split(".")[0]]: path for path in sorted(_qrels(folder))}
    for split in sorted(files, key=("train", "dev", "test").index):
        path = files[split]
        for number, line in lines(path, problems):
            row = line.split("\t")
            if number == 1 and row[-1].strip() == "score":
                continue
            if len(row) < _COLUMNS or not row[2].strip().lstrip("-").isdigit():
                fault = f"{line[:60]!r}; a line is query-id, corpus-id and a whole number, with tabs between"
                problems.add(f"{path}:{number}", BadRecord("broken qrels", fault))
            elif int(row[2]) > 0:
                kept, gold = found.setdefault(row[0], (split, {}))
                if kept == split:
                    gold[row[1]] = int(row[2])
    return found


def _qrels(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a directory; {_LAYOUT}")
    known = [path for path in folder.glob("qrels/*.tsv*") if path.name.split(".")[0] in SPLITS]
    if not known:
        raise DataError(f"{folder} has no qrels/train.tsv, dev.tsv or test.tsv; {_LAYOUT}")
    return known


def _file(folder: Path, name: str) -> Path:
    for suffix in _SUFFIXES:
        if (folder / f"{name}{suffix}").is_file():
            return folder / f"{name}{suffix}"
    raise DataError(f"{folder} has no {name}; {_LAYOUT}")
