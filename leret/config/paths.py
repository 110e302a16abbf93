"""The files that a recipe names: where they are looked for, and what is said when they are not there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from leret.config.base import Settings
from leret.config.data import DataSettings
from leret.config.evaluation import EvalRecipe
from leret.config.retriever import RetrieverSettings
from leret.config.sampling import SamplingRecipe
from leret.config.yaml import Key, Placed, dotted
from leret.core import bundled as shipped

_PROGRAM: Key = ("program", "path")
_MODEL: Key = ("policy", "model")
_TOKENIZER: Key = ("policy", "tokenizer")
_ENCODERS = (("dense", "model"), ("colbert", "checkpoint"))
"""Keys of an engine that name a directory, or a model of the hub."""
_INDEX_ROOT = ("colbert", "index_root")


class DataRecipe(Settings):
    """The part of a sampling recipe that says what the data are: all that looking at them takes."""

    data: DataSettings


class IndexRecipe(Settings):
    """The part of a sampling recipe that an index is built from."""

    data: DataSettings
    retriever: RetrieverSettings


@dataclass(frozen=True)
class _Wanted:
    """A key whose value names something on disk.

    Attributes:
        what: what is expected there, in a message.
        mend: what to do when it is missing.
    """

    key: Key
    what: str
    mend: str = "correct the path"


def locate(placed: Placed, model: type[BaseModel], beside: Path, optional: Collection[str]) -> list[str]:
    """Make the paths of a recipe absolute, in place.

    Args:
        placed: the recipe; values of a wrong type are left to validation.
        model: of its stage.
        beside: the folder of the recipe.
        optional: dotted keys whose files may be missing.

    Returns:
        One line for each file that is missing.
    """
    if model is SamplingRecipe:
        _add_default_program(placed.value)
    problems = []
    for wanted in _wanted(placed.value, model):
        given = _get(placed.value, wanted.key)
        if not isinstance(given, str) or _from_a_hub(given, wanted.key, placed.value):
            continue
        path, ending = _split(given) if wanted.key == _PROGRAM else (given, "")
        found = _search(path, beside)
        if found is None and dotted(wanted.key) in optional:
            found = Path(given).absolute()
        where = f"{placed.at(wanted.key)}{dotted(wanted.key)}"
        if found is None:
            problems.append(f"{where}: no {wanted.what} {path!r} here or beside the recipe; {wanted.mend}")
        elif wanted.key == _PROGRAM and not ending:
            problems.append(f"{where}: {given!r} names no class; write {given}:ClassName")
        else:
            _get(placed.value, wanted.key[:-1])[wanted.key[-1]] = f"{found}{ending}"
    return problems


def _add_default_program(value: dict[str, Any]) -> None:
    if value.get("program") is None:
        value["program"] = {}
    if isinstance(value["program"], dict):
        value["program"].setdefault("path", SamplingRecipe.model_fields["program"].default.path)


def _split(program: str) -> tuple[str, str]:
    """``FILE.py:Class`` as ``FILE.py`` and ``:Class``."""
    path, colon, name = program.rpartition(":")
    return (path, f"{colon}{name}") if path and name else (program.rstrip(":"), "")


def _search(given: str, beside: Path) -> Path | None:
    if not given:
        return None
    for base in (Path.cwd(), beside, beside.parent, shipped.root()):
        path = base / Path(given).expanduser()
        if path.exists():
            return path.resolve()
    return None


def _from_a_hub(given: str, key: Key, value: dict[str, Any]) -> bool:
    """``hf:NAME`` for data; for a policy ``owner/name``, unless such a folder is here or is about to be made."""
    encoder = key[-2:] in _ENCODERS
    if key not in {_MODEL, _TOKENIZER} and not encoder:
        return given.startswith("hf:")
    owner, _, name = given.partition("/")
    if not name or "/" in name or owner in {"", ".", "..", "~"}:
        return False
    return (encoder or not value.get("pretrain")) and not Path(owner).exists()


def _wanted(value: dict[str, Any], model: type[BaseModel]) -> list[_Wanted]:
    if model is EvalRecipe:
        demos = value.get("demos")
        names = list(demos) if isinstance(demos, dict) else []
        prompts = [_Wanted(("demos", name), "prompt file", "name a JSON file as in R/prompts") for name in names]
        return [_Wanted(("questions",), "question file"), *prompts]
    if model not in {SamplingRecipe, DataRecipe, IndexRecipe}:
        return []
    found = _of_engines(value)
    if _get(value, ("data", "kind")) != "world":
        found.append(_Wanted(("data", "corpus"), "corpus file"))
        if model is not IndexRecipe:
            found.append(_Wanted(("data", "questions"), "question file"))
    if model is not SamplingRecipe:
        return found
    found.append(_Wanted(_PROGRAM, "program file", "name it as FILE.py:Class"))
    found.append(_Wanted(("sampling", "bank", "path"), "directory of prompts"))
    if _get(value, ("policy", "kind")) in {None, "local"} and _get(value, _MODEL) != "demo":
        first = "`leret pretrain` this recipe first" if value.get("pretrain") else "download the model there"
        found.append(_Wanted(_MODEL, "model directory", f"{first}, or correct the path"))
    if _get(value, ("policy", "kind")) == "tgi":
        key = _TOKENIZER if _get(value, _TOKENIZER) else _MODEL
        found.append(_Wanted(key, "tokenizer directory", "set policy.tokenizer to the served model's directory"))
    return found


def _of_engines(value: dict[str, Any]) -> list[_Wanted]:
    """What the retriever names, and the engines in it."""
    engines = _get(value, ("retriever", "hybrid", "engines"))
    places: list[Key] = [("retriever",)]
    places += [("retriever", "hybrid", "engines", i) for i in range(len(engines) if isinstance(engines, list) else 0)]
    found = []
    for place in places:
        found += [
            _Wanted((*place, *key), "model directory", "download the model there, or correct the path")
            for key in _ENCODERS
        ]
        found.append(_Wanted((*place, *_INDEX_ROOT), "directory of indexes"))
    return found


def _get(value: Any, key: Key) -> Any:
    for part in key:
        if isinstance(value, list) and isinstance(part, int):
            value = value[part] if part < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value
