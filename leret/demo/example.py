"""A generated world as examples for DSPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import dspy

    from leret.retrieval.base import Retriever


class ExampleData(NamedTuple):
    """Questions for DSPy, with the ids of relevant documents in ``gold``, and a retriever over all documents."""

    trainset: list[dspy.Example]
    valset: list[dspy.Example]
    testset: list[dspy.Example]
    retriever: Retriever


def example_data(seed: int = 0, n_train: int = 150, n_val: int = 50, n_test: int = 150) -> ExampleData:
    """Generate a world of invented people and works in the words of the policy ``demo``.

    Every question has two relevant documents; the text of the first one leads to the second.
    """
    import dspy

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
