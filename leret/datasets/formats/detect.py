"""Which kind a file of questions is, told by its first record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leret.datasets.formats.hub import PREFIX
from leret.datasets.records import Problems, records


def detect_kind(path: str) -> str:
    """The kind of `leret.datasets.load.load_questions` that reads a source; jsonl tells best what is wrong with others.

    Args:
        path: a file, or a BEIR folder.

    Raises:
        DataError: it cannot be read.
    """
    if path.startswith(PREFIX):
        return "jsonl"
    if Path(path).is_dir():
        return "beir"
    first = next(iter(records(Path(path), Problems())), None)
    return "jsonl" if first is None else _kind(first.value)


def _kind(record: Mapping[str, Any]) -> str:
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
    return "jsonl"
