"""Rewards of the user's own, by ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from leret.core import stages
from leret.core.errors import USER_ERRORS, ConfigError, raised
from leret.core.types import digest


def is_function(name: str) -> bool:
    """Whether a reward's name is that of a function of the user's own."""
    return ":" in name


def load_function(name: str, key: str = "") -> Callable[..., Any]:
    """The function; its module is run. A ConfigError, with the recipe's ``key``, where there is none."""
    place = f"{key}: " if key else ""
    where, _, attribute = name.rpartition(":")
    path = source_of(name)
    try:
        if path is not None:
            stages.forget_changed(path)
        module = _of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except USER_ERRORS as error:
        raise ConfigError(
            f"{place}{where} does not run: {raised(error)}; name a reward as FILE.py:function or module:function"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        others = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise ConfigError(f"{place}{where} has no function {attribute!r}; it has {', '.join(others) or 'none'}")
    return cast("Callable[..., Any]", found)


def source_of(name: str) -> Path | None:
    """The file of a function's module, without running it; None where it has none."""
    where = name.rpartition(":")[0]
    if where.endswith(".py"):
        return Path(where)
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def source_digest(name: str) -> str | None:
    """Name a function's source with what it imports, see `leret.core.stages.source_files`; None without a file."""
    path = source_of(name)
    try:
        return None if path is None else stages.source_digest(path)
    except OSError:
        return None


def sources_digest(names: Iterable[str]) -> str | None:
    """Name the sources of those names that are functions of the user's own; None where there are none."""
    sources = {name: source_digest(name) for name in names if is_function(name)}
    return digest(sorted(sources.values(), key=str)) if sources else None


def _of_file(path: Path) -> ModuleType:
    """Run a file, once for each content of it and of what it imports."""
    name = f"leret_reward_{digest(str(path.resolve()), stages.source_digest(path))}"  # that nothing imports
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
