"""Rewards of the user's own, by ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from leret.core.errors import USER_ERRORS, ConfigError, raised
from leret.core.types import digest


def is_function(name: str) -> bool:
    """Whether a reward's name is that of a function of the user's own."""
    return ":" in name


def load_function(name: str, key: str = "") -> Callable[..., Any]:
    """The function; its module is run. A ConfigError, with the recipe's ``key``, where there is none."""
    place = f"{key}: " if key else ""
    where, _, attribute = name.rpartition(":")
    try:
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
    """Names a function's source; None where its file cannot be read."""
    path = source_of(name)
    try:
        return None if path is None else hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None


def _of_file(path: Path) -> ModuleType:
    """Run anew whenever its source is another than when it was last run."""
    source = path.read_bytes()
    name = f"leret_reward_{digest(str(path.resolve()), hashlib.blake2b(source).hexdigest())}"  # that nothing imports
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
