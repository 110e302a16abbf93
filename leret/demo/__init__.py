"""A generated world of questions and documents, with a program and a metric for it.

The shipped policy ``demo`` knows the world's words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import dspy

from leret.programs.search import Found, Search

if TYPE_CHECKING:
    from leret.retrieval.base import Retriever


class ExampleData(NamedTuple):
    """DSPy examples, and a retriever over all documents.

    ``gold`` holds the ids of an example's relevant documents.
    """

    trainset: list[dspy.Example]
    valset: list[dspy.Example]
    testset: list[dspy.Example]
    retriever: Retriever


def example_data(
    seed: int = 0, n_train: int = 150, n_val: int = 50, n_test: int = 150
) -> ExampleData:
    """Generate a world of invented people and works, in the words of the shipped policy ``demo``.

    Every question has two relevant documents. The text of the first document leads to the second.
    """
    from leret.config.retriever import BM25Settings
    from leret.core.files import cache_directory
    from leret.datasets.corpus import Corpus
    from leret.datasets.world.generate import generate
    from leret.retrieval.load import load_retriever

    documents, tasks = generate(seed, n_train, n_val, n_test, comparison=0)
    sets: dict[str, list[dspy.Example]] = {"train": [], "dev": [], "test": []}
    for task in tasks:
        example = dspy.Example(question=task.text, answer=task.answers[0], gold=list(task.gold))
        sets[str(task.split)].append(example.with_inputs("question"))
    retriever = load_retriever(BM25Settings(), Corpus(documents), cache_directory() / "example")
    return ExampleData(sets["train"], sets["dev"], sets["test"], retriever)


class MultiHop(dspy.Module):
    """Searches twice: the second query is written after reading the first passages."""

    def __init__(self) -> None:
        super().__init__()
        self.write_query = dspy.Predict("question, context: list[str] -> query")
        self.search = Search(k=3)

    def forward(self, question: str) -> dspy.Prediction:
        results = Found()
        for _ in range(2):
            query = self.write_query(question=question, context=results.passages).query
            results = self.search(query, results)
        return dspy.Prediction(context=results.passages, doc_ids=results.doc_ids)


def recall(
    example: dspy.Example, prediction: dspy.Prediction, trace: object | None = None
) -> float:
    """Return the share of the example's relevant documents that the program found; a DSPy metric."""
    return len(set(example.gold) & set(prediction.doc_ids)) / len(example.gold)
