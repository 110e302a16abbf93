"""A research agent: search any number of times, read whole documents, then answer.

`dspy.ReAct` decides at each step whether to call a tool or to finish. Copy this file and edit it; a recipe refers to it
as ``program: {path: "agent.py:Agent"}``. The tools' argument is called ``query``, the only one that the shipped policy
`agent` knows. That policy was built with one tool and hardly ever calls `look_up`; its world's documents are two lines.
"""

import dspy

from leret import Search


class Answer(dspy.Signature):
    """Search the documents until they answer the question, then answer it."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField(desc="the answer alone, in a few words")


class Agent(dspy.Module):
    """Answers a question from the documents that it finds.

    Args:
        k: passages per search.
        max_iters: tool calls before the agent must answer.
        words: words that a search shows of each passage; `look_up` shows the whole document.
        parts: passages of one document that `look_up` reads at most, if the corpus holds documents in parts.
    """

    def __init__(self, k: int = 3, max_iters: int = 4, words: int = 60, parts: int = 3) -> None:
        super().__init__()
        self.words = words
        self.index, self.reader = Search(k=k), Search(k=parts, one_document=True)
        self.agent = dspy.ReAct(Answer, tools=[self.search, self.look_up], max_iters=max_iters)

    def search(self, query: str) -> list[str]:
        """Search the documents. Returns the beginnings of the best passages, as `title | text`."""
        return [" ".join(passage.split()[: self.words]) for passage in self.index(query).passages]

    def look_up(self, query: str) -> list[str]:
        """Read a whole document. The query is its title."""
        passages = sorted(self.reader(query).ranking, key=lambda passage: (len(passage.doc_id), passage.doc_id))
        return [f"{passage.title} | {passage.text}".removeprefix(" | ") for passage in passages]

    def forward(self, question: str) -> dspy.Prediction:
        done = self.agent(question=question)
        return dspy.Prediction(answer=done.answer, trajectory=done.trajectory)
