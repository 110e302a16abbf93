"""Multi-step retrieval as a sequence of choices: pick a chunk, look again, pick the next chunk.

Q-RAG (https://arxiv.org/abs/2511.07328) trains this program. A picker sees the question and the chunks picked so far,
and chooses among all chunks of the task; no LM writes anything. Copy this file and edit it; a recipe refers to it as
``program: {path: "picks.py:Picks"}``.
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
