"""Classes and values that a JSON file can name, for what is saved and made again by another process."""

from __future__ import annotations

import importlib
import inspect
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

from leret.core.errors import ProgramError


def path_of(kind: type) -> str:
    """``package.module:Class``, of a script its file's name; a ProgramError where nothing can import the class so."""
    module, name = kind.__module__, kind.__qualname__
    if module == "__main__" and vars(main := sys.modules[module]).get(name) is kind:
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec else Path(file).stem if file else module
    path = f"{module}:{name}"
    if module == "__main__" or "<locals>" in path or (module == kind.__module__ and class_at(path) is not kind):
        raise ProgramError(f"{path} cannot be imported by another process; put the class into a module of its own")
    return path


def class_at(path: str, kind: type = object) -> Any:
    """The class at ``package.module:Class``; a ProgramError where there is none, or none of this kind."""
    module, _, name = path.partition(":")
    try:
        found = attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ProgramError(
            f"{path} cannot be imported here ({error}); install its package, or put its folder on PYTHONPATH"
        ) from error
    if not (inspect.isclass(found) and issubclass(found, kind)):
        raise ProgramError(f"{path} is no {kind.__name__}")
    return found


def plain_value(value: Any) -> bool:
    """Whether JSON gives back a value as it was."""
    if isinstance(value, list):
        return all(map(plain_value, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain_value(item) for key, item in value.items())
    return value is None or type(value) in {str, int, float, bool}
