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
    path = json_lines(tmp_path / "q", [*QUESTIONS, {"id": "q9"}])
    corpus = json_lines(tmp_path / "c", [*DOCUMENTS, DOCUMENTS[0]])
    report = inspect("jsonl", path, corpus)
    assert report.skipped == {"missing field": 1, "duplicate id": 1}
    assert report.problems[0].startswith(f"{path}:3: field 'question'")
    assert report.problems[1].startswith(f"{corpus}:4: duplicate id 'A'")
    with pytest.raises(DataError, match="first used at line or item"):
        inspect("jsonl", json_lines(tmp_path / "good", QUESTIONS), corpus, skip_invalid=False)


def test_gold_documents_that_the_corpus_lacks_are_counted_once(tmp_path):
    lost = [{"id": f"l{i}", "question": "Who?", "relevant_doc_ids": ["A", "lost", f"lost {i}"]} for i in range(2)]
    path = json_lines(tmp_path / "q", [*QUESTIONS, *lost])
    report = inspect("jsonl", path, json_lines(tmp_path / "c", DOCUMENTS))
    known = {doc_id for question in QUESTIONS for doc_id in question["relevant_doc_ids"]}
    assert report.gold_coverage == len(known) / (len(known) + 3)
    assert report.skipped == {"unknown gold": 2}
    assert inspect("jsonl", path).gold_coverage is None  # without a corpus


def test_splits_inputs_and_missing_gold_are_counted(tmp_path):
    tasks = [{"id": "1", "inputs": {"persona": "a poet", "turn": "Hello"}, "answers": ["Hi", "Good day"]},
             {"id": "2", "question": "Who?", "answer": "Ada"}]  # fmt: skip
    tasks = [{**task, "split": "dev"} for task in tasks]
    report = inspect("jsonl", json_lines(tmp_path / "q", tasks))
    assert report.inputs == {"persona, turn": 1, "question": 1}
    assert (report.gold, report.answers) == ({0: 2}, {1: 1, 2: 1})
    assert (report.n_documents, report.corpus_digest) == (0, None)
    assert (report.own_splits, report.splits) == (True, {"dev": 2})


def test_fields_are_guessed_for_questions_and_corpus(tmp_path):
    path = json_lines(tmp_path / "q", [{"q": "Who?", "gold": ["A"]}])
    corpus = json_lines(tmp_path / "c", [{"passage_id": "A", "passage": "Ada"}])
    fields = {"question": "q", "relevant_doc_ids": "gold"}
    assert guess_fields(path, None, {}) == fields
    assert guess_fields(path, corpus, {}) == {**fields, "doc_id": "passage_id", "text": "passage"}
    assert guess_fields(json_lines(tmp_path / "q", QUESTIONS), json_lines(tmp_path / "c", DOCUMENTS), {}) == {}
