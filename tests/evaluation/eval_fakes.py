"""A corpus, a retriever and a policy that fit on a page."""

from pathlib import Path

from leret.core.errors import PolicyError
from leret.core.types import Document, Passage, Task
from leret.policies.base import Completion
from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay

ROOT = Path(__file__).parents[2]
TITLES = ["Ann", "Bob", "Cid", "Dee", "Eve", "Fay"]
CORPUS = {f"d{i}": Document(f"d{i}", title, f"{title} knows {TITLES[i - 1]}") for i, title in enumerate(TITLES)}
QUESTIONS = [
    Task.question(
        f"q{i}", f"Whom does {title} know?", gold=(f"d{i}", f"d{(i - 1) % 6}"), type=("bridge", "comparison")[i % 2]
    )
    for i, title in enumerate(TITLES)
]


class Titles:
    """Finds the documents whose title stands in the query."""

    digest = "titles"

    def search(self, queries, k):
        return [
            tuple(
                Passage(d.doc_id, d.title, d.text, 9.0 - i)
                for i, d in enumerate(d for d in CORPUS.values() if d.title in query)
            )[:k]
            for query in queries
        ]


class Rule:
    """A policy that answers by a rule on the last message; None from the rule is an outage."""

    name = "rule"

    def __init__(self, rule, digest="rule"):
        self.rule = rule
        self.digest = digest
        self.n_calls = 0
        self.closed = False

    async def complete(self, request):
        self.n_calls += 1
        text = self.rule(request.messages[-1]["content"])
        if text is None:
            raise PolicyError("the server is down")
        return [Completion(text, "stop", 5, 3) for _ in request.seeds]

    async def aclose(self):
        self.closed = True


def copy_question(content):
    """The question's words."""
    return content.splitlines()[0].removeprefix("question: ")


def follow(content):
    """The name that the first passage knows, where there is a passage."""
    return content.split(" knows ")[1].split()[0] if " knows " in content else copy_question(content)


def program(hops=2, reason=False, exclude_seen=False):
    """Replay and formatter of the shipped multi-hop program."""
    arguments = {"hops": hops, "reason": reason}
    module = load_program(ROOT / "pipelines/multihop.py", "MultiHop", arguments, k=1, exclude_seen=exclude_seen)
    replay = Replay(module, CompactAdapter())
    return replay, Formatter(replay)
