"""Exceptions of leret, one per boundary.

::

    LeretError
    |-- ConfigError      a recipe, an override, a flag
    |-- DataError        a corpus, a question file, a line in it
    |-- RetrievalError   an index, a retriever, a retrieval server
    |-- PolicyError      a model directory, an LM server, a missing completion
    |-- ProgramError     a user's DSPy program: its file, class or behavior
    |-- ReplayError      a program that cannot be replayed because its steps depend on more than completions
    |-- TrainingError    a trainer, its inputs, a failed check before training
    `-- RunError         a run directory: missing, not a run, wrong version, locked, disk full

A message names the wrong value and its place, and then what to do. The command line prints only the message and
exits with ``exit_code``: 2 if the user can fix the cause, and 1 for other failures.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

USER_ERRORS = (Exception, SystemExit, GeneratorExit)
"""Exceptions from a user's function that leret catches and reports."""


class LeretError(Exception):
    """Base class of leret's exceptions."""

    exit_code = 2

    def failed(self) -> Self:
        """Set the exit code to 1, for errors that the user did not cause, and return the error."""
        self.exit_code = 1
        return self


class ConfigError(LeretError):
    """All problems in a recipe, one per line, each with its place (file, line, key) and how to fix it."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(LeretError):
    """A corpus or question file with an invalid format."""


class RetrievalError(LeretError):
    """An index or a retriever that fails; leret never scores the failure as a bad query."""


class PolicyError(LeretError):
    """A model directory or an LM server that cannot complete a prompt."""


class ProgramError(LeretError):
    """A DSPy program that cannot be loaded, replayed or saved."""


class ReplayError(LeretError):
    """A program that takes different steps or sends different messages when it is replayed."""


class TrainingError(LeretError):
    """Training that cannot start, or that failed."""


class RunError(LeretError):
    """A run directory that is missing, locked, not a run, written by another version, or on a full disk."""


class MissingDependency(LeretError):
    """A missing ``package``. The message says to run ``command``, by default the pip command for ``extra``."""

    def __init__(self, package: str, extra: str, command: str | None = None) -> None:
        advice = f"run `{command}`"
        if command is None:
            advice = (
                f"run `pip install 'leret[{extra}]'`, or in a checkout of leret "
                f"`pip install -e '.[{extra}]'`"
            )
        super().__init__(f"{package} is not installed; {advice}")


def import_optional(module: str, package: str, extra: str) -> Any:
    """Import a module from a package in leret's ``extra``; MissingDependency if the import fails."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependency(package, extra) from error


def reason(error: BaseException) -> str:
    """Return the class name and the first line of an error from another library."""
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}"


def raised(error: BaseException) -> str:
    """Return `reason` and the place in the user's code that raised the error (``ValueError: x (a.py:3)``)."""
    import sysconfig  # imported late to keep every command fast

    libraries = (
        str(Path(__file__).parents[1]),
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib")),
        "<",
    )
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(libraries):
            path = os.path.relpath(frame.filename)
            if path.startswith(".."):
                path = Path(path).name
            return f"{reason(error)} ({path}:{frame.lineno})"
    return reason(error)


def was_interrupted(error: BaseException | None) -> bool:
    """Return True for Ctrl-C, also if other code turned it into another exception (class creation does)."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
