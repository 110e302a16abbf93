"""HoVer's official files: claims to verify, over HotpotQA's Wikipedia.

``{"uid", "claim", "supporting_facts": [[title, sentence], ...], "label", "num_hops", "hpqa_id"}``. The claim stands
for the question and the label for the answer. HoVer brings no documents: it searches HotpotQA's corpus.

Source: Jiang et al., HoVer, arXiv 2011.03088.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from leret.core.types import Document, Task
from leret.datasets.formats.base import Format, optional_number, optional_text, text
from leret.datasets.formats.hotpotqa import context_documents, gold_titles
from leret.datasets.records import BadRecord


def _question(record: Mapping[str, Any]) -> Task:
    label = optional_text(record, "label") if isinstance(record.get("label"), str) else None
    return Task.question(
        id=text(record, "uid"),
        text=text(record, "claim"),
        answer=label,
        gold=gold_titles(record),
        type=label,
        hops=optional_number(record, "num_hops"),
    )


def _documents(record: Mapping[str, Any]) -> Iterable[Document]:
    if "claim" in record:
        raise BadRecord("no documents", "a HoVer file holds no documents; give HotpotQA's corpus as data.corpus")
    return context_documents(record)


HOVER = Format("HoVer", _question, _documents, shared=True)
