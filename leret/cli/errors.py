"""How a command ends: exit codes 0, 1, 2 and 130, and the one message that goes with each."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from leret.cli.console import complain
from leret.core.errors import ConfigError, LeretError, MissingDependency

_INTERRUPTED = 130
_OF_TRAINING = {"accelerate", "datasets", "peft", "safetensors", "tokenizers", "torch", "transformers", "trl"}


@contextmanager
def ended(*, debug: bool) -> Iterator[None]:
    """Turn what a command raises into a message and an exit code.

    Args:
        debug: show the traceback too.

    Raises:
        typer.Exit: with ``LeretError.exit_code``; 1 for a failure nobody foresaw; 130 after Ctrl-C.
    """
    try:
        yield
    except LeretError as error:
        _trace(debug)
        complain(_words(error))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        _trace(debug)
        complain("stopped; what was done is kept, and the same command goes on from there")
        raise typer.Exit(_INTERRUPTED) from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # `leret recipes list | head`
            raise
        _trace(debug)
        complain(_of_system(error))
        raise typer.Exit(1) from None
    except Exception as error:
        if type(error).__module__.startswith(("typer", "click")):
            if isinstance(error, RuntimeError) or type(error).__name__ == "NoArgsIsHelpError":
                raise  # typer.Exit and typer.Abort, which are its own way to end; and help where nothing is asked
            usage: Any = error
            command, message = usage.ctx.command_path if usage.ctx else "leret", usage.format_message().rstrip(".")
            complain(f"{command}: {message[:1].lower()}{message[1:]}; `{command} --help` tells what it takes")
            raise typer.Exit(2) from None
        _trace(debug)
        package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in _OF_TRAINING:
            complain(f"{MissingDependency(package, 'train')}; training and a policy in this process need it")
            raise typer.Exit(2) from None
        hint = "" if debug else "; --debug shows where"
        complain(f"unexpected {type(error).__name__}: {error}. This is a fault of leret or of a library under it{hint}")
        raise typer.Exit(1) from None


def _words(error: LeretError) -> str:
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} things to mend:", *(f"  {problem}" for problem in problems)])


def _of_system(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"{place}the disk is full: free some space and run the same command again"
    return f"{place}{error.strerror or error}"


def _trace(debug: bool) -> None:
    if debug:
        complain(traceback.format_exc().rstrip(), label="")
