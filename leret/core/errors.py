"""The exceptions of leret, one for each boundary.

::

    LeretError
    |-- ConfigError      a recipe, an override, a flag
    |-- DataError        a corpus, a question file, a line in it
    |-- RetrievalError   an index, a retriever, a retrieval server
    |-- PolicyError      a model directory, an LM server, a completion that never came
    |-- ProgramError     a user's DSPy program: its file, its class, what it does
    |-- ReplayError      a program that does not depend on its completions alone, so that it cannot be replayed
    |-- TrainingError    a trainer, its inputs, a failed pre-flight
    `-- RunError         a run directory: missing, foreign, of another version, locked, full

A message names the wrong value and its place, and then what to do. The command line prints only the message and
exits with ``exit_code``: 2 if the user can correct the cause, 1 if something failed.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, Self

_LIBRARIES = (
    str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")), "<",
)  # fmt: skip
"""Path prefixes of leret, of libraries, and of code without a file."""

USER_ERRORS = (Exception, SystemExit, GeneratorExit)
"""Exceptions of a user's function that leret reports as the function's error."""


class LeretError(Exception):
    """The base class of leret's exceptions."""

    exit_code = 2

    def failed(self) -> Self:
        """Return the error with exit code 1: the user's input was not the cause."""
        self.exit_code = 1
        return self


class ConfigError(LeretError):
    """All faults of a recipe, one per line: the place (file, line, key), the fault, and how to correct it."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(LeretError):
    """A corpus or a question file that does not have its format."""


class RetrievalError(LeretError):
    """An index or a retriever that cannot answer; leret never scores it as a bad query."""


class PolicyError(LeretError):
    """A model directory or an LM server that cannot complete a prompt."""


class ProgramError(LeretError):
    """A DSPy program that cannot be loaded, replayed or saved."""


class ReplayError(LeretError):
    """A program that reaches another step when it is replayed, or sends other messages than recorded."""


class TrainingError(LeretError):
    """A training that cannot start, or that failed."""


class RunError(LeretError):
    """A run directory that is missing, foreign, locked, of another version, or on a full disk."""


class MissingDependency(LeretError):
    """A missing ``package``, which an ``extra`` of leret or a ``command`` installs."""

    def __init__(self, package: str, extra: str, command: str | None = None) -> None:
        lines: list[str] = []
        with suppress(PackageNotFoundError):  # leret itself is not installed
            lines = requires("leret") or lines
        packages = [f"'{line.partition(';')[0]}'" for line in lines if line.endswith(f"'{extra}'")]
        others = f"; without leret on an index, `pip install {' '.join(packages)}`" if packages and not command else ""
        install = command or f"pip install 'leret[{extra}]'"
        super().__init__(f"{package} is not installed; `{install}` installs it{others}")


def import_optional(module: str, package: str, extra: str) -> Any:
    """Import a module of a package that ``extra`` installs; MissingDependency if it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependency(package, extra) from error


def reason(error: BaseException) -> str:
    """Return the class and the first line of another library's error."""
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}"


def raised(error: BaseException) -> str:
    """Return `reason` with the last line of the user's code in the traceback (``ValueError: x (a.py:3)``)."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    if not frames:
        return reason(error)
    path = os.path.relpath(frames[-1].filename)
    return f"{reason(error)} ({Path(path).name if path.startswith('..') else path}:{frames[-1].lineno})"
