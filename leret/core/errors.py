"""Everything leret raises on purpose, named by the boundary that was crossed.

::

    LeretError
    |-- ConfigError      a recipe, an override, a flag
    |-- DataError        a corpus, a question file, a line in it
    |-- RetrievalError   an index, a retriever, a retrieval server
    |-- PolicyError      a model directory, an LM server, a completion that never came
    |-- ProgramError     a user's DSPy program: its file, its class, what it does
    |-- ReplayError      a program that is no function of its completions: nothing can be sampled with it
    |-- TrainingError    a trainer, its inputs, a failed pre-flight
    `-- RunError         a run directory: missing, foreign, of another version, locked, full

A message says what was wrong, with the value and the place, and what to do next. The command line prints it
alone and exits with ``exit_code``: 2 where the user can mend it, 1 where something failed.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, Self

_NOT_THE_USERS = (
    str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")), "<",
)  # fmt: skip
"""Beginnings of the file names of leret, of libraries, and of code without a file."""

USER_ERRORS = (Exception, SystemExit, GeneratorExit)
"""What a call of a user's function may raise and leret reports as its error; KeyboardInterrupt is the user's own."""


class LeretError(Exception):
    """The root of everything leret raises on purpose."""

    exit_code = 2

    def failed(self) -> Self:
        """The same error as a failure (exit code 1): nothing the user gave was wrong."""
        self.exit_code = 1
        return self


class ConfigError(LeretError):
    """Faults of a recipe, listed together: a line each, with its place (file, line, key) and its mend."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(LeretError):
    """A corpus or a question file that cannot be read as what it claims to be."""


class RetrievalError(LeretError):
    """An index or a retriever that cannot answer; never scored as a bad query."""


class PolicyError(LeretError):
    """A model directory or an LM server that cannot complete a prompt."""


class ProgramError(LeretError):
    """A DSPy program that cannot be loaded, replayed or saved."""


class ReplayError(LeretError):
    """A program that does not come to the same place again, or sends something else than was recorded."""


class TrainingError(LeretError):
    """A training stage that refuses to start, or that failed."""


class RunError(LeretError):
    """A run directory that is missing, foreign, locked, of another version, or on a full disk."""


class MissingDependency(LeretError):
    """A ``package`` that is not installed; an ``extra`` of leret brings it, or a ``command``."""

    def __init__(self, package: str, extra: str, command: str | None = None) -> None:
        brings = command or f"pip install 'leret[{extra}]'"
        own = (
            []
            if command
            else [f"'{line.partition(';')[0]}'" for line in _requirements() if line.endswith(f"'{extra}'")]
        )
        without = f"; without leret on an index, `pip install {' '.join(own)}`" if own else ""
        super().__init__(f"{package} is not installed; `{brings}` brings it{without}")


def _requirements() -> list[str]:
    """Return leret's requirements as its installation lists them (``faiss-cpu<2; extra == 'dense'``)."""
    try:
        return requires("leret") or []
    except PackageNotFoundError:
        return []


def import_optional(module: str, package: str, extra: str) -> Any:
    """A module of a package that only ``extra`` brings; MissingDependency where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependency(package, extra) from error


def reason(error: BaseException) -> str:
    """Class and first line of somebody else's error, for a message."""
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}"


def raised(error: BaseException) -> str:
    """`reason`, with the last line of the user's own code that the error came through (``ValueError: x (a.py:3)``)."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_USERS)]
    if not frames:
        return reason(error)
    path = os.path.relpath(frames[-1].filename)
    return f"{reason(error)} ({Path(path).name if path.startswith('..') else path}:{frames[-1].lineno})"
