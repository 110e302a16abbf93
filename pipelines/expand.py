"""Multi-hop retrieval that keeps the question: each query is the question with a few added words.

The first query is the raw question. Then `Expand` picks a name for each further query, from the question or the
passages found so far. `ExpandWrite` has an LM write the words instead. Copy this file and edit it; a recipe refers to
it as ``program: {path: "expand.py:Expand"}``.
"""

import dspy

from leret import Pick, Search
from leret.core.types import Candidate
from leret.programs.mentions import mentions


class Expand(dspy.Module):
    """Finds passages with the question, then with the question plus one picked name per search.

    Args:
        k: passages for the question alone.
        picks: searches with a picked name; each search adds one new passage.
    """

    def __init__(self, k: int = 3, picks: int = 3) -> None:
        super().__init__()
        self.picks = picks
        self.first, self.more = Search(k=k), Search(k=1, exclude_seen=True)
        self.pick = Pick()

    def forward(self, question: str) -> dspy.Prediction:
        found = self.first(question)
        picked: list[Candidate] = []
        for _ in range(self.picks):
            name = self.pick(mentions(question, found), picked, question=question, titles=found.titles)
            if name is None:  # no candidates are left
                break
            if name.text:  # a pick without text repeats the question, which finds its next passage
                picked.append(name)
            found = self.more(f"{question} {name.text}".strip(), found)
        return dspy.Prediction(context=found.passages, doc_ids=found.doc_ids)


class WriteWords(dspy.Signature):
    """Write words to search for together with the question, so that the page that is still missing is found."""

    question: str = dspy.InputField()
    context: list[str] = dspy.InputField(desc="passages found so far, as `title | text`")
    words: str = dspy.OutputField(desc="a name or a few words, without those of the question")


class ExpandWrite(dspy.Module):
    """Like `Expand`, but an LM writes the words to add.

    Args:
        k: passages for the question alone.
        hops: searches with written words; each search adds one new passage.
    """

    def __init__(self, k: int = 3, hops: int = 3) -> None:
        super().__init__()
        self.hops = hops
        self.first, self.more = Search(k=k), Search(k=1, exclude_seen=True)
        self.write_words = dspy.Predict(WriteWords)

    def forward(self, question: str) -> dspy.Prediction:
        found = self.first(question)
        for _ in range(self.hops):
            words = self.write_words(question=question, context=found.passages).words
            found = self.more(f"{question} {words}", found)
        return dspy.Prediction(context=found.passages, doc_ids=found.doc_ids)
