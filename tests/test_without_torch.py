"""What `pip install leret` brings without leret[train]: sampling, evaluation and leret.load on a served policy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.sampling.fakes import SeededServer

ABSENT = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "tokenizers")

SCRIPT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from typer.testing import CliRunner
import leret
from leret.cli.app import app

def invoke(*words):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == {code}, (result.exit_code, result.output)
    return result.output

{body}
"""

SERVED = """
policy = ["policy.kind=openai", "policy.model=m", "policy.urls=[{url}]"]
sets = [word for value in (*policy, "data.limit=2") for word in ("--set", value)]
invoke("sample", "demo", "--run", "run", *sets)
words = ["limit=2", "systems=[base, raw-question]", "resamples=100"]
invoke("eval", "demo", "--run", "run", *[part for word in words for part in ("--set", word)])
found = leret.load("run/program")(question="Where was the author of the novel The Restless Engine born?")
assert isinstance(found.doc_ids, list), found
"""

LOCAL = """
told = invoke("sample", "demo", "--run", "run", "--set", "data.limit=2")
assert "leret[train]" in told, told
"""


def run(body: str, place: Path, code: int = 0) -> None:
    script = SCRIPT.format(absent=ABSENT, body=body, code=code)
    ended = subprocess.run([sys.executable, "-c", script], cwd=place, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_a_served_policy_needs_no_torch(tmp_path: Path) -> None:
    server = SeededServer()
    try:
        run(SERVED.format(url=server.url), tmp_path)
    finally:
        server.close()


def test_a_policy_in_process_names_the_extra_to_install(tmp_path: Path) -> None:
    run(LOCAL, tmp_path, code=2)
