"""Load users' functions, named ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from leret.core import stages
from leret.core.errors import USER_ERRORS, ConfigError, raised
from leret.core.types import digest


def is_function(name: str) -> bool:
    """Return True if a reward's name has the form of a user's function."""
    return ":" in name


def load_function(name: str, key: str = "") -> Callable[..., Any]:
    """Run a function's module and return the function.

    A ConfigError begins with ``key``, the key in the recipe.
    """
    place = f"{key}: " if key else ""
    where, _, attribute = name.rpartition(":")
    try:
        path = source_of(name)
        if path is not None:
            stages.forget_changed(path)
        if where.endswith(".py"):
            module = stages.run_file(Path(where), "leret_reward_")
        else:
            module = importlib.import_module(where)
    except USER_ERRORS as error:
        advice = "fix it, or name the reward as FILE.py:function or module:function"
        raise ConfigError(f"{place}{where} cannot be loaded: {raised(error)}; {advice}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = []
        for member_name, member in vars(module).items():
            if callable(member) and getattr(member, "__module__", "") == module.__name__:
                names.append(member_name)
        available = ", ".join(names) or "none"
        raise ConfigError(f"{place}{where} has no function {attribute!r}; available: {available}")
    return cast("Callable[..., Any]", function)


def source_of(name: str) -> Path | None:
    """Return the file of a function's module without running the module.

    None if there is no file.
    """
    where = name.rpartition(":")[0]
    if where.endswith(".py"):
        return Path(where)
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin)


def source_digest(name: str) -> str | None:
    """Return the digest of a function's module and its imports (`leret.core.stages`).

    None if there is no file.
    """
    path = source_of(name)
    if path is None:
        return None
    try:
        return stages.source_digest(path)
    except OSError:
        return None


def sources_digest(names: Iterable[str]) -> str | None:
    """Return one digest for all users' functions among ``names``; None if there are none."""
    sources = {name: source_digest(name) for name in names if is_function(name)}
    if not sources:
        return None
    return digest(sorted(sources.values(), key=str))
