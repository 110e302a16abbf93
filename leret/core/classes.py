"""A class's import path, stored in JSON so that another process can rebuild its objects."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from leret.core.errors import ProgramError


def path_of(kind: type) -> str:
    """Return ``package.module:Class`` (a script's module is its file name); ProgramError if it is not importable."""
    module, name = kind.__module__, kind.__qualname__
    main = sys.modules["__main__"]
    if module == "__main__" and vars(main).get(name) is kind:
        module = _importable_name(main)
    path = f"{module}:{name}"
    is_local = module == "__main__" or "<locals>" in path
    if is_local or (module == kind.__module__ and class_at(path) is not kind):
        raise ProgramError(
            f"{path} cannot be imported by another process; move the class to a module"
        )
    return path


def _importable_name(main: ModuleType) -> str:
    """Return the name by which other processes import the script that runs as ``__main__``."""
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else "__main__"


def class_at(path: str, kind: type = object) -> Any:
    """Import a class from ``package.module:Class``; ProgramError if it is missing or not a subclass of ``kind``."""
    module, _, name = path.partition(":")
    try:
        imported = attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        advice = "install its package, or add its folder to PYTHONPATH"
        raise ProgramError(f"{path} cannot be imported here ({error}); {advice}") from error
    if not (inspect.isclass(imported) and issubclass(imported, kind)):
        raise ProgramError(f"{path} is not a subclass of {kind.__name__}; save the program again")
    return imported


def plain_value(value: Any) -> bool:
    """Check whether a value survives a round trip through JSON unchanged."""
    if isinstance(value, list):
        return all(map(plain_value, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain_value(item) for key, item in value.items())
    return value is None or type(value) in {str, int, float, bool}


def constructor_arguments(file: Path, name: str) -> list[str] | None:
    """Read the argument names of a class's constructor from its file, without running the file.

    Return None if the file does not state all of them: the constructor is inherited, or takes any keyword.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if (
                    isinstance(method, ast.FunctionDef)
                    and method.name == "__init__"
                    and not method.args.kwarg
                ):
                    return [
                        argument.arg
                        for argument in [*method.args.args, *method.args.kwonlyargs][1:]
                    ]
    return None
