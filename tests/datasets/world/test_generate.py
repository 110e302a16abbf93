"""The generated world: what it promises of its questions, and how hard it is to search."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import bm25s
import pytest

from leret.core.errors import DataError
from leret.core.types import Document, Task
from leret.datasets.world.generate import generate

TITLE_CASED = re.compile(r"[A-Z]\w+(?: [A-Z]\w+)+")


@cache
def world(seed: int) -> tuple[tuple[Document, ...], tuple[Task, ...]]:
    return generate(seed)


def by_id(documents: Sequence[Document]) -> dict[str, Document]:
    return {document.doc_id: document for document in documents}


def of_split(questions: Sequence[Task], split: str) -> list[Task]:
    return [question for question in questions if question.split == split]


def names_of(text: str) -> set[str]:
    """Capitalised names of a question, its first word (In, Which, Is) left out."""
    return set(TITLE_CASED.findall(text.split(" ", 1)[1]))


def test_equal_arguments_give_equal_worlds_and_other_seeds_other_ones() -> None:
    assert generate(3, 20, 5, 20) == generate(3, 20, 5, 20)
    assert generate(3, 20, 5, 20)[1] != generate(4, 20, 5, 20)[1]


def test_sizes_types_and_splits_are_as_asked_for() -> None:
    documents, questions = world(1)
    assert {split: len(of_split(questions, split)) for split in ("train", "dev", "test")} == {
        "train": 600,
        "dev": 150,
        "test": 550,
    }
    assert 2000 <= len(documents) <= 4000
    test = of_split(questions, "test")
    assert sum(question.type == "comparison" for question in test) == round(550 * 0.25)
    assert {question.type for question in test} == {"bridge", "comparison"}
    assert all(question.hops == len(question.gold) == 2 for question in questions)


def test_every_id_is_there_once_and_every_gold_document_exists() -> None:
    documents, questions = world(1)
    known = by_id(documents)
    assert len(known) == len(documents)
    assert len({question.id for question in questions}) == len(questions)
    assert len({question.text for question in questions}) == len(questions)
    assert all(doc_id in known for question in questions for doc_id in question.gold)
    assert all(len(set(question.gold)) == len(question.gold) for question in questions)


def test_the_documents_of_one_splits_questions_are_in_no_other_split() -> None:
    _, questions = world(2)
    gold = {s: {d for q in of_split(questions, s) for d in q.gold} for s in ("train", "dev", "test")}
    assert not gold["train"] & gold["test"]
    assert not gold["train"] & gold["dev"]
    assert not gold["dev"] & gold["test"]


def test_the_names_of_held_out_questions_are_met_nowhere_in_training() -> None:
    documents, questions = world(2)
    titles = {d.doc_id: d.title.split(" (")[0] for d in documents}
    met = {
        split: {n for q in of_split(questions, split) for n in [*names_of(q.text), *(titles[d] for d in q.gold)]}
        for split in ("train", "test")
    }
    assert not met["train"] & met["test"]


def test_the_bridge_stands_in_the_first_document_and_not_in_the_question() -> None:
    documents, questions = world(1)
    known = by_id(documents)
    for question in questions:
        if question.type == "bridge":
            first, second = (known[doc_id] for doc_id in question.gold)
            assert second.title in first.text
            assert second.title not in question.text
            assert first.title.split(" (")[0] in question.text


def test_the_answer_of_a_bridge_question_stands_in_its_last_document() -> None:
    documents, questions = generate(5, 60, 0, 60, three_hop=0.5)
    known = by_id(documents)
    bridges = [question for question in questions if question.type == "bridge"]
    assert bridges
    assert all(q.answers and q.answers[0] in known[q.gold[-1]].text for q in bridges)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"comparison": 1.5}, "comparison is 1.5"),
        ({"three_hop": -0.1}, "three_hop is -0.1"),
        ({"n_test": 5000}, "1 to 2000"),
        ({"n_train": -1}, "1 to 2000"),
    ],
)
def test_impossible_worlds_are_refused_with_the_value(arguments: dict[str, float], told: str) -> None:
    with pytest.raises(DataError, match=told):
        generate(0, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_search_needs_two_good_queries(seed: int) -> None:
    """BM25, k=3 a hop, hop 2 skips what hop 1 found: the bands that the demo's bars stand on."""
    documents, questions = world(seed)
    test = of_split(questions, "test")
    known = by_id(documents)
    search = _searcher(documents)
    texts = [question.text for question in test]
    raw = _recall(search, test, texts, texts)
    titles = [[known[q.gold[hop]].title for q in test] for hop in (0, 1)]
    oracle = _recall(search, test, *titles)
    assert 0.40 <= raw[1] <= 0.60
    assert raw[0] <= 0.45
    assert oracle[1] >= 0.97
    bridges = [question for question in test if question.type == "bridge"]
    texts = [question.text for question in bridges]
    focused = [known[question.gold[0]].title for question in bridges]
    assert _recall(search, bridges, focused, focused)[0] >= _recall(search, bridges, texts, texts)[0] + 0.10


class _searcher:  # noqa: N801
    """Ids of the k best documents of each query."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.ids = [document.doc_id for document in documents]
        texts = [f"{document.title}. {document.text}" for document in documents]
        self.engine = bm25s.BM25(k1=1.5, b=0.75)
        self.engine.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)

    def __call__(self, queries: list[str], k: int) -> list[list[str]]:
        tokens = bm25s.tokenize(queries, stopwords="en", show_progress=False)
        found, _ = self.engine.retrieve(tokens, k=k, show_progress=False)
        return [[self.ids[i] for i in row] for row in found]


def _recall(search: _searcher, questions: Sequence[Task], first: list[str], second: list[str]) -> tuple[float, float]:
    """Mean recall after each hop."""
    totals = [0.0, 0.0]
    for question, one, two in zip(questions, search(first, 3), search(second, 6), strict=True):
        both = one + [doc_id for doc_id in two if doc_id not in one][:3]
        for hop, ids in enumerate((one, both)):
            totals[hop] += len(set(question.gold) & set(ids)) / len(question.gold)
    return totals[0] / len(questions), totals[1] / len(questions)
