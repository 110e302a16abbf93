"""Files of every format, in miniature."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zstandard

from leret.config.data import DataSettings
from leret.datasets import Corpus, Data, Loaded
from leret.datasets import load as load_data
from leret.datasets.inspect import DataReport
from leret.datasets.inspect import inspect as inspect_data
from leret.datasets.load import load_corpus as load_corpus_of
from leret.datasets.load import load_tasks as load_tasks_of

DOCUMENTS: list[dict[str, Any]] = [
    {"doc_id": "A", "title": "Ada", "text": "Ada wrote the first program."},
    {"doc_id": "B", "title": "Byron", "text": "Byron was a poet."},
    {"doc_id": "C", "title": "Café", "text": "A café is a place."},
]
QUESTIONS: list[dict[str, Any]] = [
    {"id": "q1", "question": "Who wrote the first program?", "answer": "Ada", "relevant_doc_ids": ["A"],
     "type": "bridge", "hops": 2},
    {"id": "q2", "question": "Who was a poet?", "answer": None, "relevant_doc_ids": ["B", "A", "B"]},
]  # fmt: skip
_BYRON, _CAFE = ["Byron", ["Byron was a poet."]], ["Café", ["A place."]]
HOTPOT: list[dict[str, Any]] = [
    {"_id": "5a", "question": "Whose father was a poet?", "answer": "Ada", "type": "bridge", "level": "hard",
     "supporting_facts": [["Ada", 0], ["Byron", 1], ["Ada", 2]],
     "context": [["Ada", ["Ada wrote.", " She was Byron's."]], _BYRON, _CAFE]},
    {"_id": "5b", "question": "Is Byron older than the café?", "answer": "yes", "type": "comparison", "level": "easy",
     "supporting_facts": [["Byron", 0], ["Café", 0]], "context": [_BYRON, _CAFE]},
]  # fmt: skip
HOVER: list[dict[str, Any]] = [
    {"uid": "u1", "claim": "Ada was Byron's.", "supporting_facts": [["Ada", 0], ["Byron", 0]], "label": "SUPPORTED",
     "num_hops": 2, "hpqa_id": "5a"},
]  # fmt: skip
MUSIQUE: list[dict[str, Any]] = [
    {
        "id": "2hop__1_2",
        "question": "Who is the mother of the first programmer?",
        "answer": "Annabella",
        "answerable": True,
        "question_decomposition": [{"id": 1}, {"id": 2}],
        "paragraphs": [
            {"idx": 0, "title": "Ada", "paragraph_text": "Ada was a programmer.", "is_supporting": True},
            {"idx": 1, "title": "Ada", "paragraph_text": "Ada is a language.", "is_supporting": False},
            {"idx": 2, "title": "Annabella", "paragraph_text": "The mother of Ada.", "is_supporting": True},
        ],
    },
]


def json_lines(path: Path, records: Sequence[Any]) -> str:
    """Write JSON lines; returns the path as a string."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


def array(path: Path, records: Sequence[Any], indent: int | None = None) -> str:
    """Write one JSON array."""
    path.write_text(json.dumps(records, ensure_ascii=False, indent=indent), encoding="utf-8")
    return str(path)


def compressed(path: Path) -> dict[str, Path]:
    """Copies of a file: gzip, gzip in two members, and Zstandard."""
    data = path.read_bytes()
    half = len(data) // 2
    made = {
        "gz": gzip.compress(data),
        "gz2": gzip.compress(data[:half]) + gzip.compress(data[half:]),
        "zst": zstandard.ZstdCompressor().compress(data),
        "zst2": zstandard.ZstdCompressor().compress(data[:half]) + zstandard.ZstdCompressor().compress(data[half:]),
    }
    copies = {name: path.with_name(f"{path.name}.{name}") for name in made}
    for name, content in made.items():
        copies[name].write_bytes(content)
    return copies


def settings(kind: str, questions: str | None = None, corpus: str | None = None, **keys: Any) -> DataSettings:
    """The `data` section; every split where none is named."""
    return DataSettings.model_validate({"kind": kind, "questions": questions, "corpus": corpus, "split": "all", **keys})


def load(kind: str, questions: str | None = None, corpus: str | None = None, **keys: Any) -> Data:
    """Tasks and corpus."""
    return load_data(settings(kind, questions, corpus, **keys))


def load_tasks(kind: str, questions: str | None = None, **keys: Any) -> Loaded:
    """Tasks alone."""
    return load_tasks_of(settings(kind, questions, **keys))


def load_corpus(kind: str, path: str | None = None, **keys: Any) -> Corpus:
    """A corpus alone."""
    return load_corpus_of(settings(kind, path, path, **keys))


def inspect(kind: str, questions: str | None = None, corpus: str | None = None, **keys: Any) -> DataReport:
    """The figures of a data set; bad records are reported."""
    return inspect_data(settings(kind, questions, corpus, **{"skip_invalid": True, **keys}))
