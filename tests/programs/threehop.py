"""A program that leret does not ship: another signature, another prompt, two predictors, three hops."""

import dspy

from leret import Search


class FirstQuery(dspy.Signature):
    """You are a librarian. Name what to look up first."""

    claim: str = dspy.InputField()
    lookup: str = dspy.OutputField()


class NextQuery(dspy.Signature):
    """You are a librarian. Name what to look up next."""

    claim: str = dspy.InputField()
    notes: list[str] = dspy.InputField()
    lookup: str = dspy.OutputField()


class ThreeHop(dspy.Module):
    def __init__(self, breadth=2):
        super().__init__()
        self.first = dspy.Predict(FirstQuery)
        self.then = dspy.Predict(NextQuery)
        self.shelf = Search(k=breadth)

    def forward(self, claim):
        found = self.shelf(self.first(claim=claim).lookup)
        for _ in range(2):
            found = self.shelf(self.then(claim=claim, notes=found.titles).lookup, found)
        return dspy.Prediction(titles=found.titles)
