import pytest

from leret.core.errors import DataError
from leret.datasets.describe import guess_fields
from tests.datasets.writing import DOCUMENTS, QUESTIONS, inspect, json_lines


def test_figures_of_a_small_set(tmp_path):
    questions = [*QUESTIONS, {"id": "q3", "question": "Who was a poet?", "relevant_doc_ids": ["B"]}]
    report = inspect("jsonl", json_lines(tmp_path / "q", questions), json_lines(tmp_path / "c", DOCUMENTS))
    assert (report.n_questions, report.n_documents, report.n_unused_documents) == (3, 3, 1)
    assert (report.types, report.hops, report.gold) == ({"bridge": 1, "unknown": 2}, {0: 2, 2: 1}, {1: 2, 2: 1})
    assert report.question_words == {"minimum": 4, "median": 4, "mean": 13 / 3, "maximum": 5}
    assert (report.duplicate_questions, report.duplicate_documents) == (2, 0)
    assert (sum(report.splits.values()), report.own_splits) == (3, False)


def test_bad_records_are_reported_and_not_refused(tmp_path):
    lost = {**QUESTIONS[0], "id": "q3", "relevant_doc_ids": ["A", "lost", "lost too"]}
    path = json_lines(tmp_path / "q", [*QUESTIONS, {"id": "q9"}, lost])
    corpus = json_lines(tmp_path / "c", [*DOCUMENTS, DOCUMENTS[0]])
    report = inspect("jsonl", path, corpus)
    assert report.skipped == {"missing field": 1, "unknown gold": 1, "duplicate id": 1}
    assert report.gold_coverage == 2 / 4  # A and B of A, B and the two that are lost
    assert report.problems[0].startswith(f"{path}:3: field 'question'")
    assert report.problems[2].startswith(f"{corpus}:4: duplicate id 'A'")
    with pytest.raises(DataError, match="first used at line or item"):
        inspect("jsonl", json_lines(tmp_path / "good", QUESTIONS), corpus, skip_invalid=False)


def test_questions_without_a_corpus_are_counted_and_their_fields_guessed(tmp_path):
    tasks = [{"id": "1", "inputs": {"persona": "a poet", "turn": "Hello"}, "answers": ["Hi", "Good day"]},
             {"id": "2", "question": "Who?", "answer": "Ada"}]  # fmt: skip
    tasks = [{**task, "split": "dev"} for task in tasks]
    report = inspect("jsonl", json_lines(tmp_path / "q", tasks))
    assert report.inputs == {"persona, turn": 1, "question": 1}
    assert (report.gold, report.answers) == ({0: 2}, {1: 1, 2: 1})
    assert (report.n_documents, report.corpus_digest, report.gold_coverage) == (0, None, None)
    assert (report.own_splits, report.splits) == (True, {"dev": 2})
    path = json_lines(tmp_path / "q", [{"q": "Who?", "gold": ["A"]}])
    assert guess_fields(path, None, {}) == {"question": "q", "relevant_doc_ids": "gold"}
