"""A corpus, a retriever and a policy that fit on a page; the data and the trained policies of a small real run."""

import json
import random
from pathlib import Path

from leret.config.evaluation import EvalRecipe
from leret.core.errors import PolicyError
from leret.core.types import Document, Passage, Task
from leret.policies.base import Completion
from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from tests.tiny import WORDS, tiny_policy

MULTIHOP = Path(__file__).parents[2] / "pipelines/multihop.py"
TITLES = ["Ann", "Bob", "Cid", "Dee", "Eve", "Fay"]
CORPUS = {f"d{i}": Document(f"d{i}", title, f"{title} knows {TITLES[i - 1]}") for i, title in enumerate(TITLES)}
QUESTIONS = [
    Task.question(f"q{i}", f"Whom does {title} know?", gold=(f"d{i}", f"d{(i - 1) % 6}"))
    for i, title in enumerate(TITLES)
]


class Titles:
    """Finds the documents whose title stands in the query."""

    digest = "titles"

    def search(self, queries, k):
        found = ([d for d in CORPUS.values() if d.title in query] for query in queries)
        return [tuple(Passage(d.doc_id, d.title, d.text, 9.0 - i) for i, d in enumerate(ds[:k])) for ds in found]


class Rule:
    """A policy that answers by a rule on the last message; None from the rule is an outage."""

    name = "rule"

    def __init__(self, rule, digest="rule"):
        self.rule, self.digest = rule, digest
        self.n_calls, self.closed = 0, False

    async def complete(self, request):
        self.n_calls += 1
        text = self.rule(request.messages[-1]["content"])
        if text is None:
            raise PolicyError("the server is down")
        return [Completion(text, "stop", 5, 3) for _ in request.seeds]

    async def aclose(self):
        self.closed = True


def follow(content):
    """The name that the first passage knows; the question's words, where there is no passage."""
    if " knows " in content:
        return content.split(" knows ")[1].split()[0]
    return content.splitlines()[0].removeprefix("question: ")


def program(hops=2, reason=False, exclude_seen=False):
    """Replay and formatter of the shipped multi-hop program."""
    module = load_program(MULTIHOP, "MultiHop", {"hops": hops, "reason": reason}, k=1, exclude_seen=exclude_seen)
    return Replay(module), Formatter(module, CompactAdapter())


NAMES = [word for word in WORDS if word.isalpha()][40:100]
FRIENDS = dict(zip(NAMES, NAMES[7:] + NAMES[:7], strict=True))


def write_data(directory):
    """corpus.jsonl and questions.jsonl, of which a second hop needs the first."""
    rng = random.Random(0)
    corpus = [
        {
            "doc_id": f"the {one}",
            "title": one,
            "text": f"{one} wrote a song for {other} {' '.join(rng.choices(NAMES, k=3))}",
        }
        for one, other in FRIENDS.items()
    ]
    questions = [
        {
            "id": f"q {i}",
            "question": f"who wrote a song for the friend of {one} ?",
            "relevant_doc_ids": [f"the {one}", f"the {other}"],
            "type": ("bridge", "comparison")[i % 2],
        }
        for i, (one, other) in enumerate(FRIENDS.items())
    ]
    for name, rows in (("corpus", corpus), ("questions", questions)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(run, name, seed, parent="base"):
    """A policy as `leret train` leaves it, of random weights."""
    record = {
        **{"parent": parent, "examples": 10, "steps": 4, "seconds": 1.0},
        "key": {"recipe": {"algorithm": "sft", "learning_rate": 0.001, "seed": 0}},
        "log_history": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}],
    }
    (tiny_policy(run.policies / name, seed=seed) / "training.json").write_text(json.dumps(record))


def asks(*systems, **keys):
    """A recipe for these systems."""
    return EvalRecipe(**{"systems": systems, "resamples": 20, **keys})
