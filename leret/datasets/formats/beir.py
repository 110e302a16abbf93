"""BEIR folders: ``corpus.jsonl``, ``queries.jsonl``, ``qrels/{train,dev,test}.tsv``. Files may be compressed.

The qrels files define the splits. A document with a score above 0 is gold, and the score is its grade.

Source: Thakur et al., BEIR, arXiv 2104.08663.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from leret.config.data import FileSettings
from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.formats.base import HUB, text
from leret.datasets.formats.jsonl import JSONL
from leret.datasets.records import BadRecord, Problems, Reader, Record, lines, records
from leret.datasets.splits import SPLITS

_LAYOUT = "kind beir needs a folder with corpus.jsonl, queries.jsonl and qrels/"


class BeirReader(Reader):
    """Reads a BEIR folder."""

    brings_documents = True

    def tasks(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Task]]:
        folder = Path(data.questions)
        judged = _judgements(folder, problems)
        for record in records(_file(folder, "queries.jsonl"), problems):
            with problems.at(record.place):
                id, query = text(record.value, "_id", "id"), text(record.value, "text")
                if id in judged:
                    split, gold = judged.pop(id)
                    relevance = gold if set(gold.values()) - {1} else {}
                    yield record, Task.question(id, query, gold=gold, split=split, relevance=relevance)
        for id in judged:
            fault = f"query {id!r} in qrels/ is not in queries.jsonl"
            problems.add(str(folder), BadRecord("no such query", fault))

    def documents(self, data: FileSettings, problems: Problems) -> Iterator[tuple[Record, Document]]:
        source = data.corpus or data.questions
        if not source.startswith(HUB) and not Path(source).is_file():
            source = str(_file(Path(source), "corpus.jsonl"))
        yield from JSONL.documents(data.model_copy(update={"corpus": source}), problems)


def _judgements(folder: Path, problems: Problems) -> dict[str, tuple[str, dict[str, int]]]:
    """Map each judged query to the first of train, dev and test that judges it, and to its gold grades there."""
    judgements: dict[str, tuple[str, dict[str, int]]] = {}
    for split, path in _qrels(folder):
        for number, line in lines(path, problems):
            row = line.split("\t")
            if number == 1 and row[-1].strip() == "score":
                continue
            if len(row) < 3 or not row[2].strip().lstrip("-").isdigit():
                fault = f"{line[:60]!r} is not query-id, corpus-id and a whole number, separated by tabs"
                problems.add(f"{path}:{number}", BadRecord("broken qrels", fault))
            elif int(row[2]) > 0:
                first, gold = judgements.setdefault(row[0], (split, {}))
                if first == split:
                    gold[row[1]] = int(row[2])
    return judgements


def _qrels(folder: Path) -> list[tuple[str, Path]]:
    names = ((SPLITS.get(path.name.split(".")[0]), path) for path in folder.glob("qrels/*.tsv*"))
    known = [(name, path) for name, path in names if name]
    if not known:
        raise DataError(f"{folder} has no qrels/train.tsv, dev.tsv or test.tsv; {_LAYOUT}")
    return sorted(known, key=lambda one: ("train", "dev", "test").index(one[0]))


def _file(folder: Path, name: str) -> Path:
    for suffix in ("", ".gz", ".zst", ".bz2"):
        if (folder / f"{name}{suffix}").is_file():
            return folder / f"{name}{suffix}"
    raise DataError(f"{folder} has no {name}; {_LAYOUT}")
