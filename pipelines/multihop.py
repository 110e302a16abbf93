"""Multi-hop retrieval: write a query, read the results, write the next query.

LeReT (https://arxiv.org/abs/2410.23214) trains this program. One predictor, shared by all hops, sees the question and
every passage found so far. Copy this file and edit it; a recipe refers to it as
``program: {path: "multihop.py:MultiHop"}``.
"""

import dspy

from leret import Found, Search


class WriteQuery(dspy.Signature):
    """Write a search query for the document that is still missing to answer the question."""

    question: str = dspy.InputField()
    context: list[str] = dspy.InputField(desc="passages found so far, as `title | text`")
    query: str = dspy.OutputField(desc="a short search query")


class MultiHop(dspy.Module):
    """Finds passages for a question with ``hops`` queries.

    Args:
        hops: queries per question.
        k: passages per query.
        reason: think step by step before each query (``ChainOfThought``).
    """

    def __init__(self, hops: int = 2, k: int = 3, reason: bool = False) -> None:
        super().__init__()
        self.hops = hops
        self.write_query = dspy.ChainOfThought(WriteQuery) if reason else dspy.Predict(WriteQuery)
        self.search = Search(k=k)

    def forward(self, question: str) -> dspy.Prediction:
        found = Found()
        for _ in range(self.hops):
            query = self.write_query(question=question, context=found.passages).query
            found = self.search(query, found)
        return dspy.Prediction(context=found.passages, doc_ids=found.doc_ids)
