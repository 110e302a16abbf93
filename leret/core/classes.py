"""Code by name: ``package.module:Name``, or ``FILE.py:Name`` for a user's reward, kind or feature function.

A class's name is stored in JSON so that another process can rebuild its objects.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from leret.core import stages
from leret.core.errors import USER_ERRORS, ConfigError, ProgramError, raised
from leret.core.types import digest


def path_of(kind: type) -> str:
    """Return ``package.module:Class`` (a script's module is its file name); ProgramError if it is not importable."""
    module = kind.__module__
    name = kind.__qualname__
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
        imported = attrgetter(name)(import_module(module))
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


def is_path(name: str) -> bool:
    """Return True if a name has the form ``FILE.py:Name`` or ``package.module:Name``."""
    where, _, member = name.rpartition(":")
    return bool(where and member)


def is_in_file(name: str) -> bool:
    """Return True if a name has the form ``FILE.py:Name``. Such code runs only if a recipe names it."""
    return name.rpartition(":")[0].endswith(".py")


def load_named(name: str, noun: str, fits: Callable[[Any], bool], key: str = "") -> Any:
    """Run the file or import the module of ``name``, and return the object; changed files run again.

    A ConfigError begins with ``key``, the key in the recipe. ``noun`` is what the object is, for messages.
    """
    place = f"{key}: " if key else ""
    where, _, attribute = name.rpartition(":")
    try:
        if is_in_file(name):
            form = "FILE.py:NAME"
            module = stages.run_file(Path(where))
        else:
            form = "package.module:NAME"
            path = source_of(name)
            if path is not None:
                stages.forget_changed(path)
            module = import_module(where)
    except USER_ERRORS as error:
        fault = raised(error)
        if is_in_file(name) and not Path(where).exists():
            fault = "no such file"
        advice = f"fix it, or name the {noun} as {form}"
        raise ConfigError(f"{place}{where} cannot be loaded: {fault}; {advice}") from error
    value = getattr(module, attribute, None)
    if not fits(value):
        names = []
        for member_name, member in vars(module).items():
            is_code = inspect.isclass(member) or inspect.isfunction(member)
            is_imported = is_code and member.__module__ != module.__name__
            if fits(member) and not is_imported:
                names.append(member_name)
        available = ", ".join(names) or "none"
        raise ConfigError(f"{place}{where} has no {noun} {attribute!r}; available: {available}")
    return value


def load_function(name: str, key: str = "") -> Callable[..., Any]:
    """Return a user's function by name; a ConfigError begins with ``key``, the key in the recipe."""
    function: Callable[..., Any] = load_named(name, "function", callable, key)
    return function


def source_of(name: str) -> Path | None:
    """Return the file of a name's module without running the module; None if there is no file."""
    where = name.rpartition(":")[0]
    if is_in_file(name):
        return Path(where)
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.has_location:  # a module of the interpreter has no file
        return None
    return Path(str(spec.origin))


def source_digest(name: str) -> str | None:
    """Return the digest of a name's module and its imports (`leret.core.stages`); None if there is no file."""
    path = source_of(name)
    if path is None:
        return None
    try:
        return stages.source_digest(path)
    except OSError:
        return None


def sources_digest(names: Iterable[str]) -> str | None:
    """Return one digest for the code of all paths among ``names``; None if there are none."""
    sources = {name: source_digest(name) for name in names if is_path(name)}
    return digest(sorted(sources.values(), key=str)) if sources else None


def identity(kind: str) -> str:
    """Return what a digest covers of a kind: its short name, or the code at its path."""
    if not is_path(kind):
        return kind
    return digest(source_digest(kind), kind.rpartition(":")[2])


def with_identity(value: Any, kind: str) -> Any:
    """Add the code of a kind named by path to ``value.digest``, and return the value."""
    if is_path(kind):
        try:
            value.digest = digest(identity(kind), value.digest)
        except AttributeError as error:
            raise ConfigError(
                f"{kind}: {type(value).__name__}.digest cannot be set; make it an attribute, not a property"
            ) from error
    return value
