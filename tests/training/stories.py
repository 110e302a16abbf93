"""Numbers of a candidate that tell which one to pick, and a program that writes and picks."""

import dspy
import numpy as np

import leret


class Mixed(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write = dspy.Predict("question -> query")
        self.search = leret.Search(k=3)
        self.pick = leret.Pick()

    def forward(self, question):
        found = self.search(self.write(question=question).query)
        one = self.pick(found.ranking, question=question)
        found = self.search(f"{question} {one.title}" if one else question, found)
        return dspy.Prediction(doc_ids=found.doc_ids)


def numbers(choice):
    """Whether a candidate names the question's word, whether it names what was picked last, and two of no use."""
    asked, last = choice.context["question"], choice.picked[-1].text if choice.picked else ""
    rows = [
        [one.text.split()[0] in asked, one.text.split()[0] in last, len(one.text) % 3, i % 2]
        for i, one in enumerate(choice.candidates)
    ]
    return ("asked", "follows", "length", "odd"), np.array(rows, np.float32)


def overlaps(choice):
    """Whether a candidate has a word of the last utterance, its number of words, and one number of no use."""
    kinds = {"film", "novel", "company", "instrument"}
    asked = kinds & {*choice.context["utterance"].lower().replace("?", "").split()}
    rows = [[bool(asked & set(one.text.lower().split())), len(one.text.split()), i % 2]
            for i, one in enumerate(choice.candidates)]  # fmt: skip
    return ("asked", "words", "odd"), np.array(rows, np.float32)
