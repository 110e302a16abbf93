"""Which kind a file of questions is, told by its first record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leret.datasets.hub import PREFIX
from leret.datasets.problems import Problems
from leret.datasets.records import records
from leret.errors import DataError

__all__ = ["detect_kind"]


def detect_kind(path: str) -> str:
    """The kind of `leret.datasets.load.load_questions` that reads a source.

    Args:
        path: a file, or a BEIR folder.

    Raises:
        DataError: it cannot be read, or its first record is of no known kind.
    """
    if path.startswith(PREFIX):
        return "jsonl"
    if Path(path).is_dir():
        return "beir"
    first = next(iter(records(Path(path), Problems())), None)
    kind = None if first is None else _kind(first.value)
    if kind is None:
        there = "no JSON object" if first is None else f"the fields {', '.join(list(first.value)[:8])}"
        raise DataError(f"{path} is of no known kind (its first record has {there}); say which one it is with --format")
    return kind


def _kind(record: Mapping[str, Any]) -> str | None:
    if "relevant_doc_ids" in record:
        return "jsonl"
    if "claim" in record:
        return "hover"
    if "paragraphs" in record:
        return "musique"
    if "evidences" in record or "evidences_id" in record:
        return "2wiki"
    if "supporting_facts" in record:
        return "hotpotqa"
    return "jsonl" if "question" in record or "query" in record else None
