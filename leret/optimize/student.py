"""The run of a student: ``run_dir``, or a directory in it where that was begun with another one."""

from __future__ import annotations

import inspect
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dspy
from pydantic_core import to_jsonable_python

from leret.core.errors import RunError
from leret.core.files import cache_directory
from leret.core.runs import Run
from leret.core.stages import check_resumable
from leret.core.types import digest
from leret.programs.pick import named_picks

logger = logging.getLogger("dspy.teleprompt.leret")  # where DSPy's own optimizers log


def begin_run(place: str | Path | None, now: Mapping[str, Any]) -> Run:
    """The run, new or begun with the same values; None makes a directory in leret's cache.

    ``now`` names all that it follows from; ``now["student"]`` is `student_digest`.

    Raises:
        RunError: the run was begun with other values, which are listed, or by `leret sample`.
    """
    if place is None:
        parent = cache_directory() / "optimize"
        parent.mkdir(parents=True, exist_ok=True)
        place = tempfile.mkdtemp(dir=parent)
    run = Run.create(Path(place).resolve())
    before = run.manifest().get("optimize")
    if before is not None and before["student"] != now["student"]:
        logger.info("LeReT: %s is of another student; what this one comes to is in its students/", run.path)
        run = Run.create(run.path / "students" / now["student"][:12])
        before = run.manifest().get("optimize")
    if before is not None:
        check_resumable(run.path, before, now, otherwise="give LeReT another run_dir")
    elif run.store.exists():
        raise RunError(f"{run.path} is a run of `leret sample`; give LeReT another run_dir")
    else:
        run.update(optimize=now)
    return run


def student_digest(program: dspy.Module, policies: Mapping[str, Any]) -> str:
    """Names a student by its code, its prompts and its weights; ``policies`` are those of its predictors."""
    predictors = [
        [name, predictor.signature.dump_state(), to_jsonable_python(predictor.demos, fallback=repr),
         policies[name].digest, *map(predictor.lm.kwargs.get, ("temperature", "max_tokens"))]
        for name, predictor in program.named_predictors()
    ]  # fmt: skip
    predictors += [[name, policies[name].digest] for name in named_picks(program)]
    return digest(([source_of(type(module)) for _, module in program.named_sub_modules()], predictors))


def source_of(thing: Any) -> str:
    """The code of a function or a class; its name where Python has none."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return name_of(thing)


def name_of(thing: Any) -> str:
    """The name of a function or a class, of another value its class's."""
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))
