"""Policies that need no weights, and programs over them."""

import dspy

import leret
from leret.optimize import inputs, trainer
from leret.policies.base import Completion
from leret.policies.checkpoints import find_model
from leret.policies.dspy_lm import PolicyEngine
from leret.policies.load import SERVED
from tests.sampling.fakes import WORDS, FakePolicy

PAIRS = {word: (word, WORDS[(i + 1) % 6]) for i, word in enumerate(WORDS)}


def example(i, **fields):
    word = WORDS[i % 6]
    fields = {"question": f"what follows {word} number {i}", "gold": list(PAIRS[word])} | fields
    return dspy.Example(**fields).with_inputs("question")


TRAIN, VAL = [example(i) for i in range(8)], [example(i) for i in range(20, 26)]


def recall(example, prediction, trace=None):
    return len(set(prediction.found) & set(example.gold)) / len(example.gold)


class Words(FakePolicy):
    def __init__(self, name, trained=False, text=None):
        super().__init__()
        self.name = self.digest = name
        self.trained, self.text = trained, text

    def _one(self, request, seed):
        question = request.messages[-1]["content"]
        made = super()._one(request, seed)
        known = next((" ".join(PAIRS[word]) for word in question.split() if word in PAIRS), "alpha beta")
        good = self.trained and (not request.temperature or seed % 3)
        text = self.text if self.text is not None else known if good else made.text
        return Completion(text, "stop", 1, 2)


class Writer(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write = dspy.Predict("question, context: list[str] -> query")
        self.search = leret.Search(k=2)

    def forward(self, question):
        found = self.search(self.write(question=question, context=[]).query)
        found = self.search(self.write(question=question, context=found.passages).query, found)
        return dspy.Prediction(found=found.doc_ids)


class Answering(Writer):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question, context: list[str] -> answer")

    def forward(self, question):
        found = self.search(self.write(question=question, context=[]).query)
        answer = self.answer(question=question, context=found.passages).answer
        return dspy.Prediction(found=found.doc_ids, answer=answer)


def fake_lm(name="words", policy=None, **settings):
    engine = PolicyEngine(policy or Words(name))
    return leret.LM(name, engine=engine, **{"finetuning_model": "leret/demo", "max_tokens": 8, **settings})


def student_of(kind=Writer, lm=None, **lms):
    program = kind()
    program.set_lm(lm or fake_lm())
    for name, other in lms.items():
        getattr(program, name).lm = other
    return program


def leret_of(run_dir=None, **settings):
    return leret.LeReT(**{"reward": "ap", "metric": recall, "run_dir": run_dir, "samples": 3, **settings})


def fake_training(patch):
    made = []

    def train(start, examples, keys, run_dir, progress):
        directory = run_dir / "policies" / f"{keys['algorithm']}-{len(made)}"
        made.append({"start": start, "examples": examples, **keys, "directory": str(directory)})
        patch.setitem(SERVED, str(directory), Words(str(directory), trained=True))
        return directory

    patch.setattr(trainer, "train_examples", train)
    patch.setattr(inputs, "find_model", lambda name: None if "policies" in name else find_model(name))
    return made
