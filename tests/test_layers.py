"""The layers of DESIGN.md: imports point down only. Every import counts: in functions and for type checking too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import leret

PACKAGE = Path(leret.__file__).resolve().parent

LAYERS = [
    {"core", ""},  # "" is leret/__init__.py itself
    {"config", "http", "rewards"},
    {"datasets", "retrieval", "policies"},
    {"programs"},
    {"sampling"},
    {"training"},
    {"evaluation"},
    {"optimize"},
    {"demo"},
    {"cli", "__main__"},
]
"""Lowest first."""

APART = [{"datasets", "retrieval", "policies"}, {"rewards", "config", "http"}]
"""Of one layer, and not to import one another."""

NEVER = {("evaluation", "training")}
"""Down, and still not allowed: what evaluates knows nothing of how a policy was trained."""

FORWARDS = {"leret/__init__.py"}
"""Lazy: it names what it hands out, and imports nothing."""


def home(module: str) -> str:
    """``leret.sampling.store.store`` is at home in ``sampling``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def layer(name: str) -> int:
    return next((i for i, names in enumerate(LAYERS) if name in names), -1)


def imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import of leret in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "leret")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level] if path.name != "__init__.py" else module.split(".")
                base = ".".join([*package, base]).rstrip(".")
            if base == "leret":  # `from leret import shipped`
                yield from ((node.lineno, f"leret.{alias.name}") for alias in node.names)
            elif base.startswith("leret."):
                yield node.lineno, base


def faults(path: Path, module: str) -> list[str]:
    here = home(module)
    found: list[str] = []
    for line, imported in imports(path, module):
        there = home(imported)
        if there.startswith("__"):
            continue
        place = f"{module}:{line} imports {imported}"
        if layer(there) < 0:
            found.append(f"{place}, which is in no layer; give it one in tests/test_layers.py")
        elif layer(there) > layer(here):
            found.append(f"{place}: upward")
        elif (here, there) in NEVER:
            found.append(f"{place}: {here} never imports {there}")
        elif here != there and any({here, there} <= group for group in APART):
            found.append(f"{place}: neighbours do not import one another")
    return found


def modules() -> list[tuple[Path, str]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if "_recipes" not in parts:
            found.append((path, ".".join(part for part in parts if part != "__init__")))
    return found


@pytest.mark.parametrize(("path", "module"), [pytest.param(*m, id=m[1]) for m in modules()])
def test_imports_point_down(path: Path, module: str) -> None:
    assert layer(home(module)) >= 0, f"{module} is in no layer; give it one in tests/test_layers.py"
    assert not faults(path, module), "\n".join(faults(path, module))


@pytest.mark.parametrize(
    ("module", "text", "says"),
    [
        ("leret.datasets.x", "def f():\n    from leret.sampling import store\n", "upward"),
        ("leret.datasets.x", "if TYPE_CHECKING:\n    import leret.cli\n", "upward"),
        ("leret.datasets.x", "from leret.policies.base import Policy\n", "neighbours"),
        ("leret.evaluation.x", "from leret.training import stage\n", "never"),
        ("leret.datasets.x", "from ..sampling import store\n", "upward"),
        ("leret.core.types", "from leret import config\n", "upward"),
        ("leret.core.types", "from leret import nothing\n", "in no layer"),
    ],
)
def test_an_import_that_points_up_is_found(tmp_path: Path, module: str, text: str, says: str) -> None:
    path = tmp_path / "x.py"
    path.write_text(text)
    assert len(faults(path, module)) == 1
    assert says in faults(path, module)[0]


def test_the_top_folders_hold_no_machinery() -> None:
    for folder in ("pipelines", "sampling", "training", "eval"):
        top = PACKAGE.parent / folder
        assert not (top / "__init__.py").exists()
        if folder != "pipelines":
            assert not list(top.rglob("*.py"))
