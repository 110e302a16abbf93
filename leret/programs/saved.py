"""An optimized program on disk, and back in any DSPy application.

``R/program`` holds the program's source, its DSPy state (``program.json``) and ``policy.json``: which policy, adapter
and retriever it runs with, as names and settings, with paths relative to the directory. Nothing in it is unpickled.
Loading it runs the program's source file, as importing any module would: load what you trust.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import dspy
from pydantic import BaseModel

from leret.config.base import with_paths
from leret.config.data import DataSettings
from leret.config.policy import PolicySettings
from leret.config.retriever import RetrieverSettings
from leret.config.sampling import AdapterSettings
from leret.core.errors import ProgramError
from leret.core.files import write_atomically
from leret.datasets.load import load_corpus
from leret.programs.adapters import make_adapter
from leret.programs.load import load_program
from leret.programs.search import Search
from leret.retrieval.base import Retriever
from leret.retrieval.caching import with_cache
from leret.retrieval.load import load_retriever

_VERSION = 2

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True)
class ProgramSource:
    """Where a program comes from: its file, its class and its constructor's arguments."""

    path: Path
    name: str
    arguments: dict[str, Any]


class TrainedProgram(dspy.Module):
    """A program with the policy, the adapter and the retriever that it was trained with.

    It is used like the program itself, under whatever ``dspy.configure`` says: its predictors keep their own LM, and
    the adapter is set around its forward pass alone.
    """

    def __init__(self, program: dspy.Module, adapter: dspy.Adapter) -> None:
        super().__init__()
        self.program = program
        self.adapter = adapter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        with dspy.context(adapter=self.adapter):
            return self.program(*args, **kwargs)

    async def aforward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program in a worker thread, so that other tasks go on."""
        return await dspy.asyncify(self.forward)(*args, **kwargs)


def save_program(
    directory: Path,
    program: dspy.Module,
    source: ProgramSource,
    *,
    adapter: AdapterSettings,
    policy: PolicySettings,
    retriever: RetrieverSettings,
    data: DataSettings,
) -> None:
    """Write what `load` needs; files that the settings name are written relative to ``directory``."""

    def portable(settings: BaseModel) -> dict[str, Any]:
        def relative(path: str) -> str:
            return os.path.relpath(path, directory) if Path(path).exists() else path

        return _with_paths(settings, relative).model_dump(mode="json")

    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source.path, directory / source.path.name)
    program.save(str(directory / "program.json"))
    value = {
        "version": _VERSION,
        "program": {"file": source.path.name, "class": source.name, "arguments": source.arguments},
        "adapter": adapter.model_dump(mode="json"),
        "policy": portable(policy),
        "retriever": portable(retriever),
        "data": portable(data),
    }
    write_atomically(directory / "policy.json", json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def load(directory: str | Path, *, lm: dspy.BaseLM | None = None, retriever: Retriever | None = None) -> TrainedProgram:
    """A trained program, ready to be called or composed into another one.

    Args:
        directory: a run's ``program`` directory.
        lm: runs the predictors instead of the saved policy (a served endpoint, say).
        retriever: searches instead of the saved index.

    Raises:
        ProgramError: the directory is not a saved program, or its source no longer runs.
        PolicyError: the policy it names is gone.
        RetrievalError: the index it names is gone or is of another corpus.
    """
    directory = Path(directory)
    saved = _read(directory)

    def located(settings: S) -> S:
        def found(path: str) -> str:
            return str((directory / path).resolve()) if (directory / path).exists() else path

        return _with_paths(settings, found)

    settings, entry = located(RetrieverSettings.model_validate(saved["retriever"])), saved["program"]
    program = load_program(
        directory / entry["file"], entry["class"], entry["arguments"], k=settings.k, exclude_seen=settings.exclude_seen
    )
    program.load(str(directory / "program.json"))
    if lm is None:
        from leret.policies.dspy_lm import policy_lm

        lm = policy_lm(located(PolicySettings.model_validate(saved["policy"])), temperature=0.0)
    program.set_lm(lm)
    if retriever is None:
        data = located(DataSettings(**saved["data"]))
        corpus = load_corpus(data) if settings.needs_corpus or data.corpus is not None else None
        retriever = with_cache(load_retriever(settings, corpus, directory / "cache"), settings)
    for _, search in program.named_sub_modules(type_=Search):
        search.retriever = retriever
    return TrainedProgram(program, make_adapter(AdapterSettings(**saved["adapter"])))


def _read(directory: Path) -> dict[str, Any]:
    path = directory / "policy.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProgramError(
            f"{directory} is not a saved program ({error}); `leret eval` writes one into R/program"
        ) from error
    if not isinstance(saved, dict) or saved.get("version") != _VERSION:
        raise ProgramError(f"{path} is not of version {_VERSION}; save the program again with this leret")
    return saved


def _with_paths(settings: S, change: Callable[[str], str]) -> S:
    return with_paths(settings, lambda key, path, mark: change(path))
