"""The stream of prompts and queries, over three documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from leret.core.types import Document, Ranking
from leret.datasets.corpus import Corpus
from leret.demo.pretrain.examples import ExampleSettings, Prompting, WriteQuery, examples, pseudo_questions
from leret.demo.pretrain.heuristics import corpus_idf
from leret.programs.adapters import CompactAdapter
from leret.retrieval.engines.bm25 import BM25

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


class Counting:
    """BM25 that counts the queries of its calls."""

    digest = "counting"

    def __init__(self) -> None:
        self.engine, self.calls = BM25.build(Corpus(DOCUMENTS)), []  # type: ignore[var-annotated]

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        self.calls.append(len(queries))
        return self.engine.search(queries, k)


def stream(n: int, retriever: Counting | None = None, **changes: Any) -> list[Any]:
    settings = ExampleSettings(**{"hop1_first": 0, "block": 4, **changes})
    return list(islice(examples(QUESTIONS, retriever or Counting(), IDF, settings, Prompting()), n))


def test_the_stream_is_the_same_for_the_same_seed_and_endless() -> None:
    assert stream(40) == stream(40)
    assert stream(40) != stream(40, seed=1)


def test_a_prompt_is_what_the_adapter_writes() -> None:
    (message,) = Prompting(adapter=CompactAdapter(words_per_item=4)).messages(
        "Who?", Counting().search(["Silent"], 1)[0]
    )
    assert message["content"] == "question: Who?\ncontext:\nSilent Harbor | Silent"
    bare = CompactAdapter().format(WriteQuery, [], {"question": "Who?", "context": []})
    assert list(Prompting().messages("Who?", ())) == bare


def test_both_hops_come_with_demos_and_without() -> None:
    made = stream(200)
    kinds = {(len(example.messages) > 1, "context:" in example.messages[-1]["content"]) for example in made}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    with_demos = sum(len(example.messages) > 1 for example in made)
    assert 50 <= with_demos <= 100  # four in ten, less those where the style had nothing to say


def test_demos_show_other_questions_and_no_context_and_targets_differ() -> None:
    for example in stream(100):
        assert example.targets
        assert len({target for target in example.targets if target.strip()}) == len(example.targets)
        *turns, last = example.messages
        shown = [turn["content"] for turn in turns if turn["role"] == "user"]
        assert last["content"].split("\n")[0] not in shown
        assert not any("context" in text for text in shown)


def test_the_first_examples_are_first_hops_and_ask_the_retriever_nothing() -> None:
    retriever = Counting()
    made = stream(12, retriever, hop1_first=12)
    assert {(len(example.messages), "context:" in example.messages[-1]["content"]) for example in made} == {(1, False)}
    assert retriever.calls == []
    stream(8, retriever)
    assert retriever.calls == [4]  # one batch a block


def test_pseudo_questions_are_sentences_of_the_corpus() -> None:
    found = pseudo_questions(DOCUMENTS, 3, seed=0)
    assert found == pseudo_questions(DOCUMENTS, 3, seed=0)
    assert "Anna Bolt is a director who was born in the small city of Port Arden?" in found
    assert "Red Dune is a film?" not in found  # fewer than eight words
