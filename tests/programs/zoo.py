"""Programs as DSPy users write them; none was written for leret beyond its searches."""

import dspy

from leret.programs.search import Found, Search

WRITE, ANSWER = "question, context: list[str] -> query", "question, context: list[str] -> answer"


class TwoPredictors(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write, self.answer = dspy.Predict(WRITE), dspy.Predict(ANSWER)
        self.search = Search(k=2)

    def forward(self, question):
        found = Found()
        for _ in range(2):
            found = self.search(self.write(question=question, context=found.passages).query, found)
        return self.answer(question=question, context=found.passages)


class Tutorial(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write = dspy.ChainOfThought("claim, notes -> query")
        self.append_notes = dspy.ChainOfThought("claim, notes, context -> new_notes: list[str], titles: list[str]")
        self.search = Search(k=2)

    def forward(self, claim):
        notes = []
        for _ in range(2):
            context = self.search(self.write(claim=claim, notes=notes).query).passages
            notes.extend(self.append_notes(claim=claim, notes=notes, context=context).new_notes)
        return dspy.Prediction(notes=notes)


class Agent(dspy.Module):
    kind = dspy.ReAct

    def __init__(self):
        super().__init__()
        self.search = Search(k=2)
        self.agent = self.kind("question -> answer", tools=[self.look_up], max_iters=3)

    def look_up(self, query: str) -> list[str]:
        """Passages for a query."""
        return self.search(query).passages

    def forward(self, question):
        return self.agent(question=question)


class Async(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write, self.answer = dspy.Predict(WRITE), dspy.Predict(ANSWER)
        self.search = Search(k=2)

    async def aforward(self, question):
        found = self.search((await self.write.acall(question=question, context=[])).query)
        return await self.answer.acall(question=question, context=found.passages)
