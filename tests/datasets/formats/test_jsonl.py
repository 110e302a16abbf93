from dataclasses import replace

import pytest

from leret.core.errors import DataError
from leret.core.types import Document, Task, digest
from tests.datasets.writing import DOCUMENTS, QUESTIONS, array, json_lines, load, load_tasks

ONE = {"id": "1", "question": "Who?", "relevant_doc_ids": ["A"]}


def test_questions_and_documents(tmp_path):
    questions = json_lines(tmp_path / "q", [*QUESTIONS, {"query": "a poet", "relevant_doc_ids": ["D"]}])
    data = load("jsonl", questions, array(tmp_path / "c", [*DOCUMENTS, {"doc_id": "D", "text": "A poet."}]))
    assert data.tasks.items == (
        Task.question("q1", "Who wrote the first program?", "Ada", ("A",), "bridge", 2),
        Task.question("q2", "Who was a poet?", None, ("B", "A")),
        Task.question(digest("a poet"), "a poet", None, ("D",)),
    )
    assert data.corpus["B"] == Document("B", "Byron", "Byron was a poet.")
    assert data.corpus["D"] == Document("D", "", "A poet.")


def test_tasks_have_gold_or_answers_and_several_named_inputs(tmp_path):
    inputs = {"persona": "a poet", "turns": ["Hello", "Who are you?"]}
    records = [{"inputs": inputs, "answers": ["Ada", "Ada Lovelace", "Ada"]},
               {**ONE, "inputs": inputs, "answer": "Ada", "answers": ["Byron"]}]  # fmt: skip
    alone, beside = load_tasks("jsonl", json_lines(tmp_path / "q", records))
    assert (alone.id, alone.inputs, alone.gold, alone.answers) == (digest(inputs), inputs, (), ("Ada", "Ada Lovelace"))
    assert (list(beside.inputs), beside.gold) == (["question", "persona", "turns"], ("A",))
    assert beside.answers == ("Ada", "Byron")


@pytest.mark.parametrize(
    ("gold", "expected"), [("B", ("B",)), (7, ("7",)), (["B", 7, "B"], ("B", "7")), ('["B", 7]', ("B", "7"))]
)
def test_gold_is_one_id_or_a_list_and_an_id_may_be_a_number(gold, expected, tmp_path):
    asked = {"id": 1, "question": "Who?", "relevant_doc_ids": gold, "answer": ["Ada", 5], "hops": "2"}
    documents = [DOCUMENTS[1], {"doc_id": 7, "text": "x"}]
    data = load("jsonl", json_lines(tmp_path / "q", [asked]), json_lines(tmp_path / "c", documents))
    assert data.tasks.items == (replace(Task.question("1", "Who?", None, expected, None, 2), answers=("Ada", "5")),)


def test_grades_stay_with_their_documents(tmp_path):
    corpus = json_lines(tmp_path / "c", [{"doc_id": i, "title": "", "text": "t"} for i in ("Caf\u00e9", "b")])
    graded = {**ONE, "relevant_doc_ids": ["Cafe\u0301", "b"], "relevance": {"Cafe\u0301": 2, "x": 0}}
    binary = {**ONE, "id": "2", "relevant_doc_ids": ["b"], "relevance": {"b": 1}}
    tasks = load("jsonl", json_lines(tmp_path / "q", [graded, binary]), corpus).tasks.items
    assert [task.grades for task in tasks] == [{"Caf\u00e9": 2, "b": 1}, {"b": 1}]
    assert [bool(task.relevance) for task in tasks] == [True, False]


LINES = {
    "nothing to score by": ({"id": "2", "question": "?!"}, "'relevant_doc_ids'.*'answers'.*the fields are 'id'"),
    "a question twice": ({**ONE, "inputs": {"question": "?"}}, "'question' is both"),
    **{f"grades {grades}": ({**ONE, "relevance": grades}, "relevance")
       for grades in ({"A": 0}, {"b": 1}, {"A": 1.5}, {"A": True}, [2])},
}  # fmt: skip


@pytest.mark.parametrize(("line", "says"), LINES.values(), ids=LINES)
def test_bad_lines_are_refused(line, says, tmp_path):
    path = json_lines(tmp_path / "q", [{**ONE, "id": "q1"}, line])
    with pytest.raises(DataError, match=rf":2: .*{says}"):
        load("jsonl", path, json_lines(tmp_path / "corpus", DOCUMENTS))


def test_bad_documents_are_refused(tmp_path):
    for records, says in (([{"doc_id": "A", "text": 5}], "'text' is '5'"), (QUESTIONS, "a question, not a document")):
        with pytest.raises(DataError, match=says):
            load("jsonl", json_lines(tmp_path / "q", QUESTIONS), json_lines(tmp_path / "c", records))
