import re

import pytest

from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.columns import guess
from tests.datasets.writing import array, csv_table, json_lines, load, load_tasks, parquet, settings

ROWS = [
    {"Nr": 1, "Frage": "Who wrote?", "Antwort": "Ada", "Beleg": ["7", "8"], "Person": "a poet", "type": 5},
    {"Nr": 2, "Frage": "Who read?", "Antwort": "Byron", "Beleg": ["8"], "Person": None, "type": 5},
]
DOCUMENTS = [{"Nr": 7, "Name": "Ada", "Inhalt": "Ada wrote."}, {"Nr": 8, "Name": "Byron", "Inhalt": "Byron read."}]
FIELDS = {"id": "Nr", "question": "Frage", "answer": "Antwort", "relevant_doc_ids": "Beleg", "type": "Person",
          "doc_id": "Nr", "title": "Name", "text": "Inhalt"}  # fmt: skip


@pytest.mark.parametrize("write", [json_lines, array, csv_table, parquet])
def test_mapped_columns_are_read_from_every_format(write, tmp_path):
    data = load("jsonl", write(tmp_path / "q", ROWS), write(tmp_path / "c", DOCUMENTS), fields=FIELDS)
    assert data.tasks.items == (
        Task.question("1", "Who wrote?", "Ada", ("7", "8"), "a poet"),
        Task.question("2", "Who read?", "Byron", ("8",)),
    )
    assert list(data.corpus.values()) == [Document("7", "Ada", "Ada wrote."), Document("8", "Byron", "Byron read.")]


def test_columns_become_program_inputs(tmp_path):
    path, fields = csv_table(tmp_path / "q", ROWS), {"answer": "Antwort", "type": "Person"}
    tasks = load_tasks("jsonl", path, fields={**fields, "question": "Frage", "inputs": {"persona": "Person"}})
    assert [task.inputs for task in tasks] == [
        {"question": "Who wrote?", "persona": "a poet"}, {"question": "Who read?", "persona": ""}]  # fmt: skip
    first, _ = load_tasks("jsonl", path, fields={**fields, "inputs": {"persona": "Person", "turn": "Frage"}})
    assert first.inputs == {"persona": "a poet", "turn": "Who wrote?"}


@pytest.mark.parametrize("write", [json_lines, csv_table, parquet])
def test_an_unknown_column_is_refused_with_the_columns_that_exist(write, tmp_path):
    path = write(tmp_path / "q", ROWS)
    for fields in ({"question": "Fragen"}, {"question": "Nr", "inputs": {"question": "Fragen"}}):
        expected = rf"{re.escape(path)}: data\.fields\.question: no column 'Fragen'; the columns are 'Frage', '"
        with pytest.raises(DataError, match=expected):
            load_tasks("jsonl", path, fields={**fields, "answer": "Antwort"}, skip_invalid=True)


def test_a_column_may_be_missing_in_some_json_lines_and_others_are_refused(tmp_path):
    rows = [{"q": "Who?", "gold": "A", "answer": 3}, {"q": "Why?", "gold": "A", "reply": "x"}]
    fields = {"question": "q", "relevant_doc_ids": "gold", "answer": "reply"}
    tasks = load_tasks("jsonl", json_lines(tmp_path / "q", rows), fields=fields)
    assert [task.answers for task in tasks] == [(), ("x",)]
    for kind, fields, says in (("beir", {"id": "x"}, "applies to kind jsonl"), ("jsonl", {"qestion": "x"}, "qestion")):
        with pytest.raises(ValueError, match=says):
            settings(kind, str(tmp_path), fields=fields)


GUESSES = {
    "qid questionText goldDocIDs referenceAnswers url":
        {"id": "qid", "question": "questionText", "relevant_doc_ids": "goldDocIDs", "answer": "referenceAnswers"},
    "Query ID;Query;Relevant Documents":
        {"id": "Query ID", "question": "Query", "relevant_doc_ids": "Relevant Documents"},
    "prompt response valid paid": {"question": "prompt", "answer": "response"},
}  # fmt: skip


DOCUMENT_GUESSES = {
    "document_id heading passage_text url": {"doc_id": "document_id", "title": "heading", "text": "passage_text"},
    "_id title text body": {},
}


def test_columns_of_questions_and_documents_are_guessed():
    for is_corpus, guesses in ((False, GUESSES), (True, DOCUMENT_GUESSES)):
        for columns, expected in guesses.items():
            example = dict.fromkeys(columns.split(";" if ";" in columns else " "), "x")
            assert guess([("file", is_corpus, [example])], {}) == expected


def test_missing_columns_of_both_files_are_reported_with_ready_flags():
    corpus = [{"k": f"P-{i}", "l": "Door", "m": "A long text about doors"} for i in range(3)]
    asked = [{"a": f"T{i}", "b": "Which door is it?", "c": f"P-{i}|P-0"} for i in range(3)]
    tables = [("c.csv", True, corpus), ("q.csv", False, asked)]
    with pytest.raises(DataError) as caught:
        guess(tables, {})
    documents, questions, _, ready = str(caught.value).splitlines()
    assert ("c.csv: " in documents, "'text'" in documents, "'doc_id'" in documents) == (True, True, True)
    assert "the fields are 'k', 'l', 'm'" in documents
    assert ("q.csv: " in questions, "'question'" in questions) == (True, True)
    assert "'relevant_doc_ids'" not in questions  # found by content
    flags = {"text": "m", "doc_id": "k", "relevant_doc_ids": "c", "question": "b"}
    assert set(ready.split(" --field ")[1:]) == {f"{name}={column}" for name, column in flags.items()}
    assert guess(tables, flags) == flags


def test_gold_documents_under_any_name_are_guessed_from_ids_of_the_corpus():
    corpus = [{"doc_id": name, "text": "t", "language": "en"} for name in ("A Door", "B", "C", "Who")]

    def guessed(cell, **flags):
        asked = {"question": "Who is by a door?", "answer": "yes", "language": "en", "proof": cell}
        return guess([("c", True, corpus), ("q", False, [asked])], flags).get("relevant_doc_ids")

    assert [guessed(cell) for cell in ("A Door;B", '["B"]', "B C", "yes")] == ["proof", "proof", "proof", None]
    assert guessed("A Door;B", relevant_doc_ids=None) is None


def test_unknown_columns_of_flags_are_reported_together_and_quoted():
    tables = [("c", True, [{"k": "A", "the text": "x"}]), ("q", False, [{"b": "Who is it?", "c": "A"}])]
    flags = {"doc_id": "nix", "text": "the text", "question": "b", "relevant_doc_ids": "gone", "type": "none"}
    with pytest.raises(DataError) as caught:
        guess(tables, flags)
    documents, questions, _, ready = str(caught.value).splitlines()
    assert "data.fields.doc_id: no column 'nix'" in documents
    assert ("no column 'gone'" in questions, "no column 'none'" in questions) == (True, True)
    assert ("--field doc_id=k" in ready, "--field text='the text'" in ready, "type=" in ready) == (True, True, False)
