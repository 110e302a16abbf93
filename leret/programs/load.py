"""Load a program named ``FILE.py:Class``, and read the names of its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dspy

from leret.config.messages import nearest
from leret.config.sampling import ProgramSettings
from leret.core.classes import load_named
from leret.core.errors import USER_ERRORS, ConfigError, ProgramError, raised
from leret.core.types import Task
from leret.programs.search import Search


def _is_program(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, dspy.Module)


def load_program(
    path: Path,
    name: str,
    arguments: dict[str, Any],
    *,
    k: int | None = None,
    exclude_seen: bool = False,
) -> dspy.Module:
    """Build the program ``name`` from a file, and apply ``exclude_seen`` to each `Search`.

    Raises ProgramError on failure.

    ``k`` (passages per search) is passed to the constructor if it takes ``k`` and ``arguments``
    does not set it.
    """
    try:
        cls = load_named(f"{path}:{name}", "dspy.Module", _is_program)
    except ConfigError as error:
        raise ProgramError(str(error)) from error
    # DSPy's metaclass hides the class's signature
    parameters = inspect.signature(cls.__init__).parameters
    if k is not None and "k" in parameters:
        arguments = {"k": k, **arguments}
    unknown = [key for key in arguments if key not in parameters]
    if unknown and not _takes_keywords(parameters):
        names = list(parameters)[1:]
        near = nearest(unknown[0], [*names, *ProgramSettings.model_fields])
        raise ProgramError(
            f"{name} takes {', '.join(names) or 'nothing'}; remove program.{unknown[0]} from the "
            f"recipe{near}"
        )
    try:
        program = cls(**arguments)
    except USER_ERRORS as error:
        raise ProgramError(f"{name}({arguments}) failed: {raised(error)}") from error
    searches = [module for _, module in program.named_sub_modules(type_=Search)]
    if exclude_seen and not searches:
        raise ProgramError(
            f"retriever.exclude_seen needs a leret.Search, and {name} has none; remove the key"
        )
    for search in searches:
        search.exclude_seen = search.exclude_seen or exclude_seen
    return program


def default_k(program: dspy.Module) -> int | None:
    """Return the default of the constructor's argument ``k``; None if it has no such default."""
    parameter = inspect.signature(type(program).__init__).parameters.get("k")
    default = getattr(parameter, "default", None)
    return default if isinstance(default, int) else None


def differing_k(program: dspy.Module, arguments: Mapping[str, Any], k: int) -> list[str]:
    """Return a note with the effective ``k`` if the program's differs from ``retriever.k``."""
    default = default_k(program)
    used = {search.k for _, search in program.named_sub_modules(type_=(Search, dspy.Retrieve))}
    stated = used
    if default is not None and "k" not in arguments:
        stated = {default}
    if not used or stated == {k}:  # a search tool sets its own number of passages
        return []
    shown = " and ".join(map(str, sorted(stated)))
    effective = " and ".join(map(str, sorted(used)))
    return [
        f"{type(program).__name__} has k {shown}, but retriever.k is {k}: "
        f"each search returns {effective} passages"
    ]


def input_names(program: dspy.Module) -> tuple[str, ...]:
    """Return ``forward``'s arguments for inputs: ``question`` if it suffices, else all required."""
    kind = type(program)
    method = getattr(kind, "forward", None) or getattr(kind, "aforward", None)
    if method is None:
        raise ProgramError(f"{kind.__name__} has neither forward nor aforward; define one of them")
    parameters = dict(list(inspect.signature(method).parameters.items())[1:])
    required = []
    for name, parameter in parameters.items():
        is_named = parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
        if is_named and parameter.default is parameter.empty:
            required.append(name)
    if "question" in parameters and set(required) <= {"question"}:
        return ("question",)
    if not required and not _takes_keywords(parameters):
        arguments = ", ".join(parameters) or "none"
        raise ProgramError(
            f"{kind.__name__}.forward has no required argument (arguments: {arguments}); add one "
            "required argument per task input, or an argument named `question`"
        )
    return tuple(required)


def _takes_keywords(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def bound_inputs(names: Sequence[str], task: Task) -> Mapping[str, Any]:
    """Return a task's inputs by argument of ``forward``; ``names`` comes from `input_names`.

    A single input goes to a single argument of any name.
    """
    if len(names) == len(task.inputs) == 1:
        return dict(zip(names, task.inputs.values(), strict=True))
    return task.inputs
