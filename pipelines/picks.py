"""Multi-step retrieval as a sequence of choices: pick a chunk, look again, pick the next chunk.

No LM writes anything. In `Picks`, a picker sees the question and the chunks picked so far, and chooses among all chunks
of the task, as in Q-RAG (https://arxiv.org/abs/2511.07328). In `SearchPicks`, it sees the question and the passages
of a search. Copy this file and edit it; a recipe refers to it as ``program: {path: "picks.py:Picks"}``.
"""

from typing import Any

import dspy

import leret


class Picks(dspy.Module):
    """Picks the chunks that answer a question.

    Args:
        budget: maximum number of chunks.
        stop: let the picker stop early.
    """

    def __init__(self, budget: int = 2, stop: bool = False) -> None:
        super().__init__()
        self.budget = budget
        self.pick = leret.Pick(stop=stop, retrieves=True)

    def forward(self, question: str, chunks: list[Any]) -> dspy.Prediction:
        picked: list[Any] = []
        for _ in range(self.budget):
            chosen = self.pick(chunks, picked, question=question)
            if chosen is None:  # the picker stops, or no chunks are left
                break
            picked.append(chosen)
        return dspy.Prediction(context=[chunk.text for chunk in picked], doc_ids=[chunk.id for chunk in picked])


class SearchPicks(dspy.Module):
    """Searches once for many passages, then picks those that fit the question best: a reranker.

    Args:
        k: passages of the search, which are the candidates.
        budget: number of picks.
    """

    def __init__(self, k: int = 20, budget: int = 3) -> None:
        super().__init__()
        self.budget = budget
        self.search = leret.Search(k=k, candidates=True)
        self.pick = leret.Pick(retrieves=True)

    def forward(self, question: str) -> dspy.Prediction:
        left = list(self.search(question).ranking)
        picked: list[Any] = []
        while left and len(picked) < self.budget:
            picked.append(self.pick(left, question=question))  # earlier picks are not passed, so they do not count
            left = [passage for passage in left if passage.doc_id != picked[-1].id]
        return dspy.Prediction(context=[chunk.text for chunk in picked], doc_ids=[chunk.id for chunk in picked])
