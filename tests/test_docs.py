"""Every command and every Python block of the README and the docs is run, in a folder of its own.

Small values are put in for speed: a tiny random policy, a few questions. What cannot be run here (set-up, which tests
themselves run in; servers) is listed by name, so that nothing is left out unseen.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leret.cli.app import app
from leret.core.errors import LeretError
from tests.first_steps import write_world
from tests.tiny import tiny_policy

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SMALL = {
    "sample": ["data.limit=6", "sampling.samples=2", "sampling.prompts=1", "policy.max_tokens=6"],
    "train": ["learning_rate=1e-3", "num_train_epochs=1", "max_length=512", "warmup_ratio=0", "require_spread=false"],
    "eval": ["limit=4", "resamples=100", "systems=[raw-question, base, policies]"],
}
"""Overrides by command; they come before those of the docs, which win."""

SMALLER = {
    "sampling/demo.yaml": {"split: train": "split: train\n  limit: 12", "prompts: 4": "prompts: 1"},
    "eval/demo.yaml": {"limit: null": "limit: 4", "resamples: 10000": "resamples: 100"},
}
"""Changes to the recipes themselves, for `leret run`, which takes no overrides."""

NOT_RUN = {
    "vllm": "a server",
    "pip": "set-up",
    "python": "runs the tests",
    "leret demo": "minutes; test_cli.py runs it, small, and test_demo.py as it is, marked slow",
    "leret serve": "runs until it is stopped; tests/policies/serving and tests/retrieval/test_server.py start them",
    "scripts/vllm_cpu.sh": "set-up, gigabytes of it",
    "leret eval-retriever": "its files are the reader's; tests/eval/test_retriever.py runs it",
    "leret pretrain": "minutes to an hour; tests/demo/pretrain has its parts",
    "sqlite3": "another program; the query is run below",
}


def blocks(language: str) -> list[tuple[str, str]]:
    """File and text of every block in a language."""
    found = []
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        found += [(path.name, body) for lang, body in BLOCK.findall(text) if lang == language]
    return found


def plain(line: str) -> list[str]:
    return shlex.split(line, comments=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout: recipes and programs, with data of the reader's own and a policy made from MiniLM."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("sampling", "training", "eval", "pipelines"):
        shutil.copytree(ROOT / name, folder / name)
    write_world(folder)
    for name, changes in SMALLER.items():
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")
    tiny_policy(folder / "policies" / "minilm")
    return folder


def small(args: list[str]) -> list[str]:
    """The command with small values put in before its own."""
    if args[0] not in SMALL or "demo" in args[1]:
        return args
    return [*args[:2], *(part for value in SMALL[args[0]] for part in ("--set", value)), *args[2:]]


def run(args: list[str]) -> None:
    """Run a leret command of the docs."""
    result = CliRunner().invoke(app, small(args))
    nothing = ("no usable", "no pair", "spread", "nothing to train")  # a random policy may not give a single pair
    if args[0] == "train" and result.exit_code == 2 and any(words in result.output for words in nothing):
        return
    assert result.exit_code == 0, f"{' '.join(args)}:\n{result.output}"


def skipped(line: str) -> bool:
    words = plain(line)
    if "--print" in words:
        return False
    return words[0] in NOT_RUN or " ".join(words[:2]) in NOT_RUN


def whole(text: str) -> list[list[str]]:
    return [plain(line) for line in text.splitlines() if line.split("#")[0].strip()]


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_the_commands_of_a_document_run_in_their_order(
    document: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for language, body in BLOCK.findall(document.read_text(encoding="utf-8")):
        if language != "sh":
            continue
        for words in whole(body):
            line = " ".join(words)
            if words[0] == "make":
                made = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
                assert made.returncode == 0, made.stderr
            elif skipped(line):
                continue
            else:
                assert words[0] == "leret", f"{document.name}: {line}: not run, and not listed in NOT_RUN"
                run(words[1:])


@pytest.mark.parametrize(("name", "body"), blocks("yaml"))
def test_a_yaml_block_is_part_of_a_valid_recipe(name: str, body: str) -> None:
    from leret.config.sampling import SamplingRecipe
    from leret.core import yaml

    SamplingRecipe.model_validate({"data": {"kind": "world"}, **yaml.load(body)})


def test_the_python_blocks_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    if not (place / "runs" / "demo").exists():
        for line in ("sample sampling/demo.yaml", "train training/demo-sft.yaml", "eval eval/demo.yaml"):
            run([*line.split(), "--run", "runs/demo"])
    if not (place / "runs" / "world").exists():
        shutil.copytree(place / "runs" / "demo", place / "runs" / "world")
    for name, body in blocks("python"):
        if "class " in body:  # a program: a file, which a recipe names
            (place / "my_program.py").write_text(body, encoding="utf-8")
            run(["sample", "sampling/demo.yaml", "--run", "runs/own", "--set", "program.path=my_program.py:MultiHop"])
            continue
        try:
            exec(compile(body, name, "exec"), {})
        except LeretError as error:
            pytest.fail(f"{name}: {error}")


def test_the_query_of_the_docs_reads_the_store(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    monkeypatch.chdir(place)
    (query,) = [plain(line)[2] for _, line in blocks_lines() if line.startswith("sqlite3 ")]
    if not (place / "runs" / "world").exists():
        run(["sample", "sampling/demo.yaml", "--run", "runs/world"])
    connection = sqlite3.connect("runs/world/rollouts.db")
    assert connection.execute(query).fetchall()
    connection.close()


def blocks_lines() -> list[tuple[str, str]]:
    """File and line of every shell block."""
    return [(name, line) for name, body in blocks("sh") for line in body.splitlines() if line.strip()]


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize(("section", "stage"), [("Sampling", "sampling"), ("Training", "training"),
                                                ("Evaluation", "eval")])  # fmt: skip
def test_every_key_is_documented_and_every_documented_key_exists(section: str, stage: str) -> None:
    from leret.config.base import models_in
    from leret.config.evaluation import EvalRecipe
    from leret.config.sampling import SamplingRecipe
    from leret.training.algorithms import TrainingRecipe

    recipes: dict[str, list[Any]] = {"sampling": [SamplingRecipe], "eval": [EvalRecipe]}
    recipes["training"] = list(TrainingRecipe.kinds())
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split(f"## {section}")[1].split("\n## ")[0]
    told: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", row)
        section, dot, _ = names[0].rpartition(".")  # `retriever.urls`, `email`: the others are of the same section
        told |= {name if "." in name or not dot else f"{section}.{name}" for name in names}
    known: set[str] = set()
    for recipe in recipes[stage]:
        for name, field in recipe.model_fields.items():
            inner = [] if name == "lora" else list(models_in(field.annotation))
            known |= {f"{name}.{key}" for model in inner for key in model.model_fields} or {name}
    known = {"program.adapter.kind" if k == "program.adapter" else k for k in known}
    known = {"sampling.bank.*" if k == "sampling.bank" else k for k in known}
    undocumented = {"pretrain.steps", "pretrain.minutes", "pretrain.seed", "pretrain.options", "sampling.margin",
                    "sampling.max_pairs"}  # fmt: skip
    assert told - known == set()
    of_engines = {key for key in known if key.startswith("retriever.")}  # docs/retrieval.md has the rest of them
    assert known - told - undocumented - of_engines == set()
