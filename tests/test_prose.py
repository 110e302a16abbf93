import ast
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import figures

FORBIDDEN = frozenset(
    {"told", "found", "own", "made", "given", "kept", "opened", "settled"}
    | {"bench", "fellow", "mend", "partly", "front", "thrift", "here"}
)
"""Participles, adverbs and metaphors: they do not say what a thing is."""

OPENINGS = frozenset({"What", "Of", "As", "By", "Who", "Whose", "Where", "That", "Whether", "Whatever"})
"""First words of a docstring that answers a question instead of naming an action."""


def identifiers(node):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name


def faults(tree):
    for node in ast.walk(tree):
        for name in identifiers(node):
            if name.strip("_") in FORBIDDEN:
                yield f"{node.lineno}: {name}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            opening = re.match(r"\w+", ast.get_docstring(node) or "")
            if opening and opening[0] in OPENINGS:
                yield f"{node.lineno}: {node.name}: {opening[0]} ..."


def test_names_and_docstrings_follow_the_style_guide():
    found = [f"{module}:{fault}" for module, path in figures.sources().items() for fault in faults(figures.tree(path))]
    assert found == []
