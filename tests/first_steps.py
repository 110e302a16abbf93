"""Data of a reader's own, for what README and docs run on it."""

from leret.datasets.world.generate import generate
from tests.datasets.writing import json_lines


def write_world(folder):
    """Write questions.jsonl (100 of them) and corpus.jsonl in leret's JSON lines, without splits."""
    documents, questions = generate(1, n_train=70, n_dev=10, n_test=20)
    corpus = [{"doc_id": d.doc_id, "title": d.title, "text": d.text} for d in documents]
    asked = [{"id": q.id, "question": q.text, "answer": q.answers[0], "relevant_doc_ids": q.gold} for q in questions]
    json_lines(folder / "corpus.jsonl", corpus)
    json_lines(folder / "questions.jsonl", asked)
