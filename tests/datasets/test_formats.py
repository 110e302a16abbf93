"""What a record of each format becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from leret.core.errors import DataError
from leret.core.types import Document, Task, digest
from leret.datasets.load import load, load_corpus, load_questions
from tests.datasets.writing import DOCUMENTS, HOTPOT, HOVER, MUSIQUE, QUESTIONS, array, json_lines


def test_our_own_lines(tmp_path: Path) -> None:
    data = load("jsonl", json_lines(tmp_path / "q", QUESTIONS), json_lines(tmp_path / "c", DOCUMENTS))
    assert data.questions.items == (
        Task.question("q1", "Who wrote the first program?", "Ada", ("A",), "bridge", 2),
        Task.question("q2", "Who was a poet?", None, ("B", "A")),
    )
    assert data.corpus["B"] == Document("B", "Byron", "Byron was a poet.")


def test_queries_without_ids_over_an_array_without_titles(tmp_path: Path) -> None:
    queries = json_lines(tmp_path / "q", [{"query": "a poet", "relevant_doc_ids": ["B"]}])
    corpus = array(tmp_path / "c.json", [{"doc_id": "B", "text": "Byron was a poet."}])
    data = load("jsonl", queries, corpus)
    assert data.questions.items == (Task.question(digest("a poet"), "a poet", None, ("B",)),)
    assert list(data.corpus.values()) == [Document("B", "", "Byron was a poet.")]


def test_a_named_set_in_our_own_format_is_told_by_its_fields(tmp_path: Path) -> None:
    corpus, questions = json_lines(tmp_path / "c", DOCUMENTS), json_lines(tmp_path / "q", QUESTIONS)
    for kind in ("hotpotqa", "hover", "musique", "2wiki"):
        assert load(kind, questions, corpus).questions.items == load("jsonl", questions, corpus).questions.items


def test_hotpotqa_gold_and_corpus_come_from_titles(tmp_path: Path) -> None:
    data = load("hotpotqa", array(tmp_path / "h.json", HOTPOT))
    assert data.questions.items[0] == Task.question(
        "5a", "Whose father was a poet?", "Ada", ("Ada", "Byron"), "bridge", 2
    )
    assert list(data.corpus) == ["Ada", "Byron", "Café"]
    assert data.corpus["Ada"].text == "Ada wrote. She was Byron's."


def test_hotpotqa_as_the_hub_tables_hold_it(tmp_path: Path) -> None:
    rows = [
        {
            **{"id": record["_id"], "question": record["question"], "answer": record["answer"], "type": record["type"]},
            "supporting_facts": {
                "title": [t for t, _ in record["supporting_facts"]],
                "sent_id": [n for _, n in record["supporting_facts"]],
            },
            "context": {"title": [t for t, _ in record["context"]], "sentences": [s for _, s in record["context"]]},
        }
        for record in HOTPOT
    ]
    official, table = (
        load("hotpotqa", array(tmp_path / "h", HOTPOT)),
        load("hotpotqa", json_lines(tmp_path / "t", rows)),
    )
    assert table.questions.items == official.questions.items
    assert table.corpus.digest == official.corpus.digest


def test_hotpotqa_over_an_abstracts_file(tmp_path: Path) -> None:
    articles = [{"id": "12", "url": "u", "title": d["title"], "text": [d["text"], " More."]} for d in DOCUMENTS]
    data = load("hotpotqa", array(tmp_path / "h", HOTPOT), json_lines(tmp_path / "wiki", articles))
    assert data.corpus["Byron"].text == "Byron was a poet. More."


def test_2wiki_hops_are_its_gold_documents(tmp_path: Path) -> None:
    record = {**HOTPOT[0], "type": "bridge_comparison", "supporting_facts": [["Ada", 0], ["Byron", 0], ["Café", 0]]}
    (question,) = load("2wiki", array(tmp_path / "w", [record])).questions
    assert (question.type, question.hops, question.gold) == ("bridge_comparison", 3, ("Ada", "Byron", "Café"))


def test_hover_claims_over_hotpotqa_documents(tmp_path: Path) -> None:
    data = load("hover", array(tmp_path / "v", HOVER), array(tmp_path / "h", HOTPOT))
    assert data.questions.items == (
        Task.question("u1", "Ada was Byron's.", "SUPPORTED", ("Ada", "Byron"), "SUPPORTED", 2),
    )


def test_hover_facts_as_the_hub_holds_them(tmp_path: Path) -> None:
    row = {**HOVER[0], "label": 1, "supporting_facts": [{"key": "Ada", "value": 0}, {"key": "Byron", "value": 0}]}
    (question,) = load_questions("hover", json_lines(tmp_path / "v", [row]))
    assert question.gold == ("Ada", "Byron")


def test_musique_paragraphs_of_one_title_are_two_documents(tmp_path: Path) -> None:
    data = load("musique", json_lines(tmp_path / "m", MUSIQUE))
    (question,) = data.questions
    assert (question.hops, question.type, len(data.corpus)) == (2, "2hop", 3)
    assert [data.corpus[doc_id].text for doc_id in question.gold] == ["Ada was a programmer.", "The mother of Ada."]
    assert [document.title for document in data.corpus.values()] == ["Ada", "Ada", "Annabella"]


def test_gold_takes_the_corpus_form_of_unicode(tmp_path: Path) -> None:
    questions = [{"id": "q", "question": "Where?", "relevant_doc_ids": ["Cafe\u0301"]}]  # e and a combining accent
    corpus = [{"doc_id": "Caf\u00e9", "text": "A place."}]
    data = load("jsonl", json_lines(tmp_path / "q", questions), json_lines(tmp_path / "c", corpus))
    assert data.questions.items[0].gold == ("Caf\u00e9",)


def test_a_corpus_alone(tmp_path: Path) -> None:
    assert len(load_corpus("hotpotqa", array(tmp_path / "h.json", HOTPOT))) == 3


def test_grades_of_json_lines_stay_with_their_documents(tmp_path: Path) -> None:
    corpus = json_lines(tmp_path / "c", [{"doc_id": i, "title": "", "text": "t"} for i in ("Caf\u00e9", "b")])
    graded = {
        "id": "1",
        "question": "?",
        "relevant_doc_ids": ["Cafe\u0301", "b"],
        "relevance": {"Cafe\u0301": 2, "x": 0},
    }
    binary = {"id": "2", "question": "??", "relevant_doc_ids": ["b"], "relevance": {"b": 1}}
    questions = load("jsonl", json_lines(tmp_path / "q", [graded, binary]), corpus).questions.items
    assert [question.grades for question in questions] == [{"Caf\u00e9": 2, "b": 1}, {"b": 1}]
    assert [bool(question.relevance) for question in questions] == [True, False]


@pytest.mark.parametrize("relevance", [{"a": 0}, {"b": 1}, {"a": 1.5}, {"a": True}, [2]])
def test_grades_that_contradict_the_gold_are_refused(tmp_path: Path, relevance: object) -> None:
    line = {"id": "1", "question": "?", "relevant_doc_ids": ["a"], "relevance": relevance}
    with pytest.raises(DataError, match="relevance"):
        load_questions("jsonl", json_lines(tmp_path / "q", [line]))
