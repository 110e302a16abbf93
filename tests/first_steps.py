"""Data of a reader's own, for what README and docs run on it."""

from __future__ import annotations

import json
from pathlib import Path

from leret.datasets.world.generate import generate

__all__ = ["write_world"]


def write_world(folder: Path) -> None:
    """Write questions.jsonl (100 of them) and corpus.jsonl (1,000 documents) in leret's JSON lines, without splits."""
    documents, questions = generate(1, n_train=70, n_dev=10, n_test=20)
    corpus = [{"doc_id": d.doc_id, "title": d.title, "text": d.text} for d in documents]
    corpus += [
        {"doc_id": f"n{i}", "title": f"Note {i}", "text": f"A note of page {i}."} for i in range(len(corpus), 1000)
    ]
    asked = [
        {"id": q.id, "question": q.text, "answer": q.answers[0] if q.answers else None, "relevant_doc_ids": q.gold}
        for q in questions
    ]
    for name, records in (("corpus", corpus), ("questions", asked)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
