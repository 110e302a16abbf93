"""One-shot query augmentation: rewrite the question as a better query for a search engine.

DeepRetrieval (https://arxiv.org/abs/2503.00223) trains this program, with one step and one search. Copy this file and
edit it; a recipe refers to it as ``program: {path: "rewrite.py:Rewrite"}``.
"""

import dspy

from leret import Search


class RewriteQuery(dspy.Signature):
    """Rewrite the question as a search query: add the words that the documents it asks for would use."""

    question: str = dspy.InputField()
    query: str = dspy.OutputField(desc="the query, ready for the search engine")


class Rewrite(dspy.Module):
    """Searches once with a rewritten question.

    Args:
        k: passages to return.
        keep_question: search for the question followed by the rewritten query.
        reason: think step by step first (``ChainOfThought``).
    """

    def __init__(self, k: int = 3, keep_question: bool = False, reason: bool = False) -> None:
        super().__init__()
        self.keep_question = keep_question
        self.rewrite = dspy.ChainOfThought(RewriteQuery) if reason else dspy.Predict(RewriteQuery)
        self.search = Search(k=k)

    def forward(self, question: str) -> dspy.Prediction:
        query = self.rewrite(question=question).query
        found = self.search(f"{question} {query}" if self.keep_question else query)
        return dspy.Prediction(context=found.passages, doc_ids=found.doc_ids)
