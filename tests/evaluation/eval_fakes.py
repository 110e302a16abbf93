import json

from leret.config.evaluation import EvalRecipe
from leret.core.types import Document
from leret.policies.base import Completion
from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from tests.sampling.fakes import DOCS, ROOT
from tests.tiny import tiny_policy

CORPUS = {word: Document(word, word, text) for word, text in DOCS.items()}


class Rule:
    name = "rule"

    def __init__(self, rule, digest):
        self.rule, self.digest = rule, digest
        self.n_calls, self.closed = 0, False

    async def complete(self, request):
        self.n_calls += 1
        return [Completion(self.rule(request.messages[-1]["content"]), "stop", 5, 3) for _ in request.seeds]

    async def aclose(self):
        self.closed = True


def follow(content):
    if " leads to " in content:
        return content.split(" leads to ")[1].split()[0]
    return content.splitlines()[0].removeprefix("question: ")


def program(hops=2, reason=False, exclude_seen=False):
    path, arguments = ROOT / "pipelines/multihop.py", {"hops": hops, "reason": reason}
    return parts_of(load_program(path, "MultiHop", arguments, k=1, exclude_seen=exclude_seen))


def parts_of(module):
    replay = Replay(module, CompactAdapter())
    return replay, Formatter(replay)


def train(run, name, seed, parent="base"):
    record = {"parent": parent, "examples": 10, "steps": 4, "seconds": 1.0}
    record["key"] = {"recipe": {"algorithm": "sft", "learning_rate": 0.001, "seed": 0}}
    record["log_history"] = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    (tiny_policy(run.policies / name, seed=seed) / "training.json").write_text(json.dumps(record))


def asks(*systems, **keys):
    return EvalRecipe(**{"systems": systems, "resamples": 20, **keys})
