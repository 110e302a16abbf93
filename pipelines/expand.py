"""Multi-hop retrieval that keeps the question: each query is the question with a few added words.

The first query is the raw question. Then `Expand` picks a name for each further query, from the question or the
passages found so far. `ExpandWrite` has an LM write the words instead. Copy this file and edit it; a recipe refers to
it as ``program: {path: "expand.py:Expand"}``.
"""

import re
from collections.abc import Sequence

import dspy

from leret import Pick, Search
from leret.core.types import Candidate
from leret.programs.mentions import mentions
from leret.programs.search import Found


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


WEIGHTS = {
    "own": 11.0,  # a name in the question,
    "own_read": -6.0,  # which the passages mention
    "rank_0": 4.5,  # the first passage of the first search
    "rank_1": -3.0,
    "sentence_overlap": 4.5,
    "first_sentence": -1.5,
    "after_question_word": 2.0,
    "titled": -1.5,
    "several_words": 1.5,
    "adjective": -1.0,
}
"""Weights of the features of `leret.programs.mentions`, fitted to the recall that a name adds (HotpotQA, train)."""


class WriteWords(dspy.Signature):
    """Write words to search for together with the question, so that the page that is still missing is found."""

    question: str = dspy.InputField()
    context: list[str] = dspy.InputField(desc="passages found so far, as `title | text`")
    names: list[str] = dspy.InputField(desc="numbered suggestions, the most promising first")
    words: str = dspy.OutputField(desc="a suggestion with its number, or other words; several searches as `a; b`")


class ExpandWrite(dspy.Module):
    """Like `Expand`, but an LM writes the words to add: a suggested name, other words, or ``nothing``.

    Args:
        k: passages for the question alone.
        additions: searches with written words; each search adds one new passage.
        context: whether the LM sees the passages; without them, the prompt is short enough for a tiny LM.
    """

    def __init__(self, k: int = 3, additions: int = 3, context: bool = True) -> None:
        super().__init__()
        self.additions, self.context = additions, context
        self.first, self.more = Search(k=k), Search(k=1, exclude_seen=True)
        self.write_words = dspy.Predict(WriteWords if context else WriteWords.delete("context"))

    def forward(self, question: str) -> dspy.Prediction:
        found = self.first(question)
        tried: list[str] = []
        while len(tried) < self.additions:
            lines = numbered(likely_names(question, found, tried))
            context = {"context": found.passages} if self.context else {}
            written = self.write_words(question=question, names=lines, **context).words.split(";")
            new = [added(part, lines) for part in written][: self.additions - len(tried)]
            found = self.more([f"{question} {words}".strip() for words in new], found)
            tried += new
        return dspy.Prediction(context=found.passages, doc_ids=found.doc_ids)


def numbered(names: Sequence[str]) -> list[str]:
    """Return the lines that a prompt shows: numbered names, then ``0 nothing``."""
    return [*(f"{number} {name}" for number, name in enumerate(names, 1)), "0 nothing"]


def added(written: str, lines: Sequence[str] = ()) -> str:
    """Return the words that a completion adds to the question, without a line's number; ``nothing`` adds none.

    A number alone stands for its line in ``lines``.
    """
    written = written.strip()
    by_number = dict(line.split(" ", 1) for line in lines)
    words = by_number.get(written.rstrip(".:)")) or re.sub(r"^\d{1,2}[.:)]? +(?=\S)", "", written)
    return "" if words.lower() == "nothing" else words


def likely_names(question: str, found: Found, tried: Sequence[str] = (), n: int = 12) -> list[str]:
    """Return at most ``n`` names from the question and the passages, the most promising first.

    The order needs no gold documents; see `WEIGHTS`.
    """
    seen = {words.lower() for words in tried}

    def score(name: Candidate) -> float:
        return sum(weight * float(name.data.get(feature, 0)) for feature, weight in WEIGHTS.items())

    names = [name for name in mentions(question, found) if name.text and name.text.lower() not in seen]
    return [name.text for name in sorted(names, key=score, reverse=True)[:n]]
