"""2WikiMultihopQA's official files: HotpotQA's layout with types of its own.

``type`` is comparison, bridge_comparison, inference or compositional. Hops are the gold documents of a question: 2,
or 4 for a bridge_comparison.

Source: Ho et al., 2WikiMultihopQA, arXiv 2011.01060.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leret.core.types import Task
from leret.datasets.formats.base import Format, optional_text, text
from leret.datasets.formats.hotpotqa import context_documents, gold_titles


def _question(record: Mapping[str, Any]) -> Task:
    gold = gold_titles(record)
    return Task.question(
        id=text(record, "_id", "id"),
        text=text(record, "question"),
        answer=optional_text(record, "answer"),
        gold=gold,
        type=optional_text(record, "type"),
        hops=len(gold),
    )


TWOWIKI = Format("2WikiMultihopQA", _question, context_documents, shared=True)
