import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import dspy

from leret.config.policy import LocalPolicySettings
from leret.policies.base import Request
from leret.policies.dspy_lm import policy_lm
from leret.policies.local.policy import LocalPolicy
from leret.programs.adapters import CompactAdapter
from leret.programs.saved import save
from tests.programs.zoo import TwoPredictors
from tests.sampling.fakes import FakeRetriever, SeededServer
from tests.tiny import tiny_policy

SCRIPT = """
import sys
ABSENT = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "tokenizers"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from typer.testing import CliRunner
import leret
from leret.cli.app import app

def invoke(code, command, *values):
    words = [command, "demo", "--run", "run", *(word for value in values for word in ("--set", value))]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, (result.exit_code, result.output)
    return result.output
"""
SERVED = """
told = invoke(2, "sample", "data.limit=2")
assert "leret[train]" in told, told
small = ["data.options={{n_train: 20, n_dev: 5, n_test: 5}}", "data.limit=2", "sampling.prompts=2"]
small += ["sampling.bank={{candidates: 2, train_questions: 4, dev_questions: 4}}"]
invoke(0, "sample", "policy.kind=openai", "policy.model=m", "policy.urls=[{url}]", *small)
invoke(0, "eval", "limit=2", "systems=[base, raw-question]", "resamples=100")
found = leret.load("run/program")(question="Where was the author of the novel The Restless Engine born?")
assert isinstance(found.doc_ids, list), found
"""
LOADED = """
from tests.sampling.fakes import FakeRetriever
program = leret.load("saved", serve="{url}", retriever=FakeRetriever())
print(program(question="what follows alpha ?").answer)
"""


def run(body, place):
    command = [sys.executable, "-c", SCRIPT + body]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_a_served_policy_needs_no_torch_and_a_saved_program_answers_as_it_did_in_process(tmp_path):
    policy = LocalPolicy(LocalPolicySettings(model=str(tiny_policy(tmp_path / "ipo"))))
    program = TwoPredictors()
    program.set_lm(policy_lm(policy, temperature=0.0, max_tokens=8))
    save(program, tmp_path / "saved", adapter=CompactAdapter())

    def complete(body):
        request = Request(tuple(body["messages"]), (0,), body["temperature"], body["max_tokens"])
        [[one]] = policy.complete_many([request])
        choice = {"index": 0, "message": {"content": one.text}, "finish_reason": one.finish_reason}
        return {"choices": [choice], "usage": {"prompt_tokens": one.n_prompt_tokens}}

    with closing(SeededServer()) as server, dspy.context(adapter=CompactAdapter(), rm=FakeRetriever()):
        server.names, server.lie = ("ipo-" + policy.digest[:8],), complete
        answer = program(question="what follows alpha ?").answer
        with closing(SeededServer()) as sampler:
            commands = SERVED.format(url=sampler.url) + LOADED.format(url=server.url)
            assert run(commands, tmp_path).splitlines()[-1] == answer
    policy.close()
