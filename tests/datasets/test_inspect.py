"""The figures of a data set."""

from __future__ import annotations

from pathlib import Path

import pytest

from leret.datasets.inspect import Spread, inspect
from leret.errors import DataError
from tests.datasets.writing import DOCUMENTS, HOTPOT, QUESTIONS, array, json_lines


def test_figures_of_a_small_set(tmp_path: Path) -> None:
    questions = [*QUESTIONS, {"id": "q3", "question": "Who was a poet?", "relevant_doc_ids": ["Z"]}]
    report = inspect("jsonl", json_lines(tmp_path / "q", questions), json_lines(tmp_path / "c", DOCUMENTS))
    assert (report.n_questions, report.n_documents, report.n_unused_documents) == (3, 3, 1)
    assert report.types == {"bridge": 1, "unknown": 2}
    assert report.hops == {0: 2, 2: 1}
    assert report.gold == {1: 2, 2: 1}
    assert report.question_words == Spread(4, 4, 13 / 3, 5)
    assert report.document_words == Spread(5, 6, 17 / 3, 6)
    assert (report.missing_gold, report.n_missing_gold) == ((("q3", "Z"),), 1)
    assert (report.duplicate_questions, report.duplicate_documents) == (2, 0)
    assert sum(report.splits.values()) == 3
    assert not report.own_splits
    assert [question.id for question in report.examples] == ["q1", "q2", "q3"]


def test_bad_records_are_reported_and_not_refused(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "q", [*QUESTIONS, {"id": "q9"}])
    corpus = json_lines(tmp_path / "c", [*DOCUMENTS, DOCUMENTS[0]])
    report = inspect("jsonl", path, corpus)
    assert report.skipped == {"missing field": 1, "duplicate id": 1}
    assert report.problems[1].startswith(f"{corpus}:4: document 'A'")
    assert report.problems[0].startswith(f"{path}:3: field 'question'")
    alone = inspect("jsonl", path)
    assert (alone.n_documents, alone.corpus_digest) == (0, None)
    with pytest.raises(DataError, match="was there before"):
        inspect("jsonl", json_lines(tmp_path / "good", QUESTIONS), corpus, skip_bad=False)


def test_contexts_are_the_corpus_where_none_is_named(tmp_path: Path) -> None:
    assert inspect("hotpotqa", array(tmp_path / "h", HOTPOT)).n_documents == 3


def test_the_generated_world_has_its_own_splits() -> None:
    report = inspect("world", options={"n_train": 20, "n_dev": 5, "n_test": 10})
    assert report.own_splits
    assert report.splits == {"dev": 5, "test": 10, "train": 20}
