"""Bad input of every kind, through the command line: one clear message, exit code 2 (or 1), and an intact run.

A message is clear when it names the value, its place and the mend; each case says which words those are.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leret.cli.app import app
from leret.core import yaml
from leret.core.runs import Run
from tests.tiny import tiny_policy

ROOT = Path(__file__).resolve().parents[1]

RECIPE = """\
data: {kind: jsonl, corpus: c.jsonl, questions: q.jsonl}
retriever: {k: 1}
policy: {model: model, max_tokens: 4}
program: {path: "program.py:Two", hops: 2, adapter: {kind: compact}}
sampling: {prompts: 1, samples: 2}
"""

PROGRAM = """\
import dspy
from leret import Found, Search

class Two(dspy.Module):
    def __init__(self, hops=2, k=1):
        super().__init__()
        self.hops, self.write, self.search = hops, dspy.Predict("question, context: list[str] -> query"), Search(k=k)

    def forward(self, question):
        found = Found()
        for _ in range(self.hops):
            found = self.search(self.write(question=question, context=found.passages).query, found)
        return dspy.Prediction(doc_ids=found.doc_ids)
"""


def leret(*args: str | Path) -> tuple[int, str]:
    """Exit code and all output of a command."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.output


def refused(*args: str | Path, says: tuple[str, ...], code: int = 2) -> str:
    """A command that must end with one message; returns it."""
    got, out = leret(*args)
    message = out[out.find("error: ") :]
    assert got == code, out
    assert out.count("error: ") == 1, out
    assert "Traceback" not in out, out
    for words in says:
        assert words in message, f"{words!r} is not in: {message}"
    return message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random policy."""
    return tiny_policy(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with data, model, program, recipe, and a run ``R`` that was sampled."""
    folder = tmp_path_factory.mktemp("sampled")
    words = ["river", "city", "film", "book", "song", "king", "queen", "road", "moon", "star",
             "night", "country", "band", "mother", "father", "prize", "school", "garden", "bridge", "island"]  # fmt: skip
    documents = [{"doc_id": f"d{i}", "title": f"The {w}", "text": f"{w} of {w}"} for i, w in enumerate(words)]
    asked = [{"id": f"q{i}", "question": f"Where is the {w}?", "answer": w, "relevant_doc_ids": [f"d{i}"]}
             for i, w in enumerate(words)]  # fmt: skip
    (folder / "c.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    (folder / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in asked))
    (folder / "program.py").write_text(PROGRAM)
    (folder / "r.yaml").write_text(RECIPE)
    shutil.copytree(model, folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        code, out = leret("sample", "r.yaml", "--run", "R")
    assert code == 0, out
    return folder


@pytest.fixture
def folder(tmp_path: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``sampled`` to spoil, as the current directory; its run names files of the first one."""
    shutil.copytree(sampled, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def snapshot(run: Path) -> dict[str, str]:
    """What a run holds: its files' bytes, and its store's rows."""
    passing = {"events.jsonl", "rollouts.db", "rollouts.db-wal", "rollouts.db-shm", "rollouts.db.lock"}
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name not in passing]
    found = {str(path.relative_to(run)): hashlib.blake2b(path.read_bytes()).hexdigest() for path in files}
    if (run / "rollouts.db").is_file():
        connection = sqlite3.connect(run / "rollouts.db")
        found["rollouts.db"] = hashlib.blake2b("".join(connection.iterdump()).encode()).hexdigest()
        connection.close()
    return found


def edit(path: str, change: Callable[[str], str]) -> None:
    Path(path).write_text(change(Path(path).read_text()))


# --- recipes -------------------------------------------------------------------------------------------------------


RECIPES = {
    "a tab": (RECIPE.replace("retriever: {k: 1}", "retriever:\n\tk: 1"), ("r.yaml:3: not YAML: a tab", "spaces")),
    "a recipe of another stage": ("algorithm: sft\n", ("r.yaml: a recipe for `leret train`, not for `leret sample`",)),
    "three faults": (RECIPE.replace("k: 1", "k: 0").replace("c.jsonl", "nix"), ("2 things to mend", "retriever.k", "nix")),
    "an unknown reward": (RECIPE.replace("samples: 2", "samples: 2, reward: recal"), ("r.yaml:5: sampling.reward", "recall")),
}  # fmt: skip


@pytest.mark.parametrize("kind", RECIPES)
def test_a_bad_recipe(folder: Path, kind: str) -> None:
    text, says = RECIPES[kind]
    Path("r.yaml").write_text(text)
    refused("sample", "r.yaml", "--run", "new", says=says)
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param(["nix.yaml"], ("nix.yaml: no such recipe", "leret recipes list"), id="no such recipe"),
        pytest.param(["r.yaml", "--set", "program.hopps=3"], ("Two takes hops, k", "program.hopps"), id="no argument"),
    ],
)
def test_a_bad_call(folder: Path, args: list[str], says: tuple[str, ...]) -> None:
    refused("sample", *args, "--run", "new", says=says)


# --- data ----------------------------------------------------------------------------------------------------------


def broken_line(path: str) -> None:
    edit(path, lambda text: text.replace("\n", '\n{"id": "q0"\n', 1))


def test_bad_data_of_a_run_that_was_sampled_leave_it_as_it_was(folder: Path) -> None:
    before = snapshot(Path("R"))
    broken_line("q.jsonl")
    refused("sample", "r.yaml", "--run", "R", says=("q.jsonl:2",))
    assert snapshot(Path("R")) == before


# --- programs and models -------------------------------------------------------------------------------------------


def pickled() -> None:
    Path("model/model.safetensors").unlink()
    Path("model/pytorch_model.bin").write_bytes(b"\x80\x04")


PARTS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "program lacks the class": (
        lambda: edit("program.py", lambda t: t.replace("class Two", "class Three")), ("no dspy.Module 'Two'", "it has Three")),
    "program raises at work": (
        lambda: edit("program.py", lambda t: t.replace("found = Found()", "found = Found(); 1 / 0")), ("ZeroDivisionError",)),
    "model has pickled weights": (pickled, ("no *.safetensors", "pytorch_model.bin", "save_pretrained")),
    "model has a broken config": (lambda: Path("model/config.json").write_text("{"), ("config.json",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", PARTS)
def test_a_run_whose(folder: Path, kind: str) -> None:
    spoil, says = PARTS[kind]
    spoil()
    refused("sample", "r.yaml", "--run", "new", says=says)


def test_a_server_that_is_not_there_fails_and_the_run_can_go_on(folder: Path) -> None:
    served = [
        "--set",
        "policy={kind: openai, model: m, urls: ['http://127.0.0.1:9/v1'], timeout_s: 2, retry_for_s: 0, max_tokens: 4}",
        "--set",
        "data.limit=2",
    ]
    refused("sample", "r.yaml", "--run", "new", *served, says=("127.0.0.1:9",), code=1)
    Run.open(Path("new"))
    code, out = leret("sample", "r.yaml", "--run", "new")
    assert code == 0, out


# --- run directories -----------------------------------------------------------------------------------------------


def manifest(change: Callable[[dict[str, object]], object]) -> None:
    value = yaml.load(Path("R/run.yaml").read_text())
    change(value)
    Path("R/run.yaml").write_text(yaml.dump(value))


RUNS: dict[str, tuple[Callable[[], object], list[str], tuple[str, ...]]] = {
    "is not empty and no run": (lambda: None, ["sample", "r.yaml", "--run", "model"], ("not empty and is not a run",)),
    "has a spoilt store": (lambda: Path("R/rollouts.db").write_bytes(b"nix" * 99), ["pairs", "--run", "R"], ("rollouts.db",)),
    "was begun with another recipe": (
        lambda: None, ["sample", "r.yaml", "--run", "R", "--set", "retriever.k=2"], ("retriever.k: 1 in the run, 2",)),
    "was sampled by another program": (
        lambda: edit("program.py", lambda t: t + "\n# more\n"), ["sample", "r.yaml", "--run", "R"], ("program: its content",)),
    "has no samples": (
        lambda: manifest(lambda m: m.pop("sampling")), ["train", "training/sft.yaml", "--run", "R"], ("leret sample",)),
    "has no such policy": (
        lambda: None, ["train", "training/ipo.yaml", "--run", "R"], ("init_from: 'sft' is not base", "train sft first")),
    "has no preferences": (
        lambda: shutil.rmtree("R/preferences"), ["train", "training/dpo.yaml", "--run", "R", "--set", "init_from=base"],
        ("preferences",)),
    "has no such system": (
        lambda: None, ["eval", "eval/demo.yaml", "--run", "R", "--set", "systems=[bse]"], ("'bse'", "did you mean base?")),
    "is measured by nothing known": (
        lambda: None, ["eval", "eval/demo.yaml", "--run", "R", "--set", "measures=[recal]"], ("recal",)),
    "was sampled on the questions asked": (
        lambda: None, ["eval", "eval/demo.yaml", "--run", "R", "--set", "split=all"], ("q",)),
    "margin without its strategy": (
        lambda: None, ["pairs", "--run", "R", "--margin", "0.1"], ("--margin 0.1: strategy adjacent takes none",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_that(folder: Path, kind: str) -> None:
    spoil, args, says = RUNS[kind]
    spoil()
    before = [path.read_bytes() for path in (Path("R/run.yaml"), Path("R/rollouts.db"))]
    refused(*args, says=says)
    assert [path.read_bytes() for path in (Path("R/run.yaml"), Path("R/rollouts.db"))] == before


def test_a_run_that_another_process_samples_into(folder: Path) -> None:
    from leret.sampling.store.store import Store

    with Store(Path("R/rollouts.db")):
        refused("sample", "r.yaml", "--run", "R", "--set", "sampling.concurrency=9", says=("R", "another process"))


def test_a_full_disk(folder: Path) -> None:
    before = snapshot(Path("R"))
    Path("R/events.jsonl").rename("kept.jsonl")
    Path("R/events.jsonl").symlink_to("/dev/full")
    args = ["train", "training/sft.yaml", "--run", "R", "--set", "require_spread=false", "--set", "learning_rate=1e-3"]
    refused(*args, says=("R cannot be written: the disk is full: free some space and run the same command again",))
    after = snapshot(Path("R"))
    assert {name: after.get(name) for name in before if name != "run.yaml"} == {
        name: digest for name, digest in before.items() if name != "run.yaml"
    }
    Path("R/events.jsonl").unlink()
    Path("kept.jsonl").rename("R/events.jsonl")
    code, out = leret(*args)
    assert code == 0, out


def test_a_disk_that_fills_up_while_sampling(folder: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # every file, the store among them

    command = [sys.executable, "-m", "leret", "sample", "r.yaml", "--run", "new", "--set", "sampling.samples=40"]
    result = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=limited, env={**_environment(), "PYTHONPATH": str(ROOT)}
    )
    assert result.returncode in {1, 2}, result.stderr
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    code, out = leret(*command[3:])
    assert code == 0, out


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
