"""The stream of prompts and queries, over a retriever of three documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from leret.core.errors import DataError
from leret.core.types import Document, Passage, Ranking
from leret.demo.pretrain.examples import ExampleSettings, Prompting, WriteQuery, examples, pseudo_questions
from leret.demo.pretrain.heuristics import corpus_idf
from leret.programs.adapters import CompactAdapter

DOCUMENTS = [
    Document("a", "Silent Harbor", "Silent Harbor is a film directed by Anna Bolt and released in the year 1990."),
    Document("b", "Anna Bolt", "Anna Bolt is a director who was born in the small city of Port Arden."),
    Document("c", "Red Dune", "Red Dune is a film. Milo Vane made it for the studio of Otto Kern in 1995."),
]
QUESTIONS = [
    "Where was the director of Silent Harbor born?",
    "Who made Red Dune for Otto Kern?",
    "Which film came first, Red Dune or Silent Harbor?",
    "In which city was Anna Bolt born?",
]
IDF = corpus_idf(f"{d.title} {d.text}" for d in DOCUMENTS)


class Overlap:
    """Ranks by shared words; counts its calls."""

    digest = "overlap"

    def __init__(self) -> None:
        self.calls: list[int] = []

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        self.calls.append(len(queries))
        return [self._one(query, k) for query in queries]

    def _one(self, query: str, k: int) -> Ranking:
        words = set(query.lower().split())
        scored = [
            Passage(d.doc_id, d.title, d.text, float(len(words & set(f"{d.title} {d.text}".lower().split()))))
            for d in DOCUMENTS
        ]
        return tuple(sorted((p for p in scored if p.score > 0), key=lambda p: -p.score)[:k])


def stream(n: int, **changes: object) -> list[Any]:
    settings = ExampleSettings(**{"hop1_first": 0, "block": 4, **changes})  # type: ignore[arg-type]
    return list(islice(examples(QUESTIONS, Overlap(), IDF, settings), n))


def test_the_stream_is_the_same_for_the_same_seed_and_endless() -> None:
    assert stream(40) == stream(40)
    assert stream(40) != stream(40, seed=1)


def test_a_prompt_is_what_the_adapter_writes() -> None:
    adapter = CompactAdapter(words_per_item=4)
    ranking = Overlap().search(["Silent Harbor"], 1)[0]
    (message,) = Prompting(adapter=adapter).messages("Who?", ranking)
    assert message["content"] == "question: Who?\ncontext:\nSilent Harbor | Silent"
    assert list(Prompting().messages("Who?", ())) == CompactAdapter().format(
        WriteQuery, [], {"question": "Who?", "context": []}
    )


def test_both_hops_come_with_demos_and_without() -> None:
    made = stream(200)
    kinds = {(len(example.messages) > 1, "context:" in example.messages[-1]["content"]) for example in made}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    with_demos = sum(len(example.messages) > 1 for example in made)
    assert 50 <= with_demos <= 100  # four in ten, less those where the style had nothing to say


def test_demos_show_other_questions_and_no_context_and_targets_differ() -> None:
    for example in stream(100):
        assert example.targets
        assert len(set(example.targets)) == len(example.targets)
        assert all(target.strip() for target in example.targets)
        *turns, last = example.messages
        shown = [turn["content"] for turn in turns if turn["role"] == "user"]
        asked = last["content"].split("\n")[0]
        assert asked not in shown
        assert not any("context" in text for text in shown)


def test_the_first_examples_are_first_hops_and_ask_the_retriever_nothing() -> None:
    retriever = Overlap()
    made = list(islice(examples(QUESTIONS, retriever, IDF, ExampleSettings(hop1_first=12, block=4)), 12))
    assert not any("context:" in example.messages[-1]["content"] for example in made)
    assert {len(example.messages) for example in made} == {1}
    assert retriever.calls == []
    list(islice(examples(QUESTIONS, retriever, IDF, ExampleSettings(hop1_first=0, block=4)), 8))
    assert retriever.calls == [4]  # one batch a block


def test_one_question_is_too_few() -> None:
    with pytest.raises(DataError, match="two questions"):
        next(examples(QUESTIONS[:1], Overlap(), IDF, ExampleSettings()))


def test_pseudo_questions_are_sentences_of_the_corpus() -> None:
    found = pseudo_questions(DOCUMENTS, 3, seed=0)
    assert found == pseudo_questions(DOCUMENTS, 3, seed=0)
    assert "Anna Bolt is a director who was born in the small city of Port Arden?" in found
    assert "Red Dune is a film?" not in found  # fewer than eight words
