"""A program that leret does not ship: another signature, another prompt, two predictors, three hops."""

import dspy

from leret import Search


class ThreeHop(dspy.Module):
    def __init__(self, breadth=2):
        super().__init__()
        librarian = "You are a librarian. Name what to look up"
        self.first = dspy.Predict(dspy.Signature("claim -> lookup", f"{librarian} first."))
        self.then = dspy.Predict(dspy.Signature("claim, notes: list[str] -> lookup", f"{librarian} next."))
        self.shelf = Search(k=breadth)

    def forward(self, claim):
        found = self.shelf(self.first(claim=claim).lookup)
        for _ in range(2):
            found = self.shelf(self.then(claim=claim, notes=found.titles).lookup, found)
        return dspy.Prediction(titles=found.titles)
