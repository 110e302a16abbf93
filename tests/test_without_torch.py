"""What `pip install leret` brings without leret[train]: sampling, evaluation and leret.load on a served policy."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests.sampling.fakes import SeededServer

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
invoke(0, "sample", "policy.kind=openai", "policy.model=m", "policy.urls=[{url}]", "data.limit=2")
invoke(0, "eval", "limit=2", "systems=[base, raw-question]", "resamples=100")
found = leret.load("run/program")(question="Where was the author of the novel The Restless Engine born?")
assert isinstance(found.doc_ids, list), found
"""


def run(body: str, place: Path) -> None:
    command = [sys.executable, "-c", SCRIPT + body]
    ended = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_a_served_policy_needs_no_torch(tmp_path: Path) -> None:
    with closing(SeededServer()) as server:
        run(SERVED.format(url=server.url), tmp_path)


def test_a_policy_in_process_names_the_extra_to_install(tmp_path: Path) -> None:
    run('told = invoke(2, "sample", "data.limit=2")\nassert "leret[train]" in told, told', tmp_path)
