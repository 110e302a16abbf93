"""Reading a recipe: YAML, overrides and files, with every fault listed at once and its place beside it.

``load_recipe("sampling/demo.yaml", SamplingRecipe, ["sampling.samples=2"])`` gives the frozen model of `leret.config`,
with the paths in it made absolute. A relative path is looked for in the current directory, in the recipe's folder, in
the folder around that, and at last among what leret ships.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from leret.config.conflicts import clashes
from leret.config.evaluation import EvalRecipe
from leret.config.messages import describe
from leret.config.paths import DataRecipe, IndexRecipe, locate
from leret.config.sampling import SamplingRecipe
from leret.config.training import TrainingRecipe
from leret.core import bundled as shipped
from leret.core.errors import ConfigError
from leret.core.yaml import Key, Placed, parse

R = TypeVar("R", SamplingRecipe, TrainingRecipe, EvalRecipe, DataRecipe, IndexRecipe)

_FOLDERS: dict[type[BaseModel], str] = {SamplingRecipe: "sampling", TrainingRecipe: "training", EvalRecipe: "eval"}
_COMMANDS: dict[type[BaseModel], str] = {SamplingRecipe: "sample", TrainingRecipe: "train", EvalRecipe: "eval"}


def load_recipe(
    path: str | Path, model: type[R], overrides: Sequence[str] = (), *, optional: Collection[str] = ()
) -> R:
    """Read a recipe.

    Args:
        path: a YAML file, or the name of a shipped recipe.
        model: of the stage.
        overrides: ``a.b=c``; the value is YAML. They win over the file.
        optional: dotted keys whose files may be missing (``policy.model`` when it is about to be made).

    Raises:
        ConfigError: all faults together, each with its place and its mend.
    """
    file = find_recipe(path, _FOLDERS[model])
    placed = _read(file)
    _refuse_other_stage(placed, model, file)
    problems = list(placed.problems)
    for override in overrides:
        problems += _override(placed, override)
    return _checked(placed, model, file.resolve().parent, optional, problems)


def flag_recipe(
    value: dict[str, Any],
    model: type[R],
    flags: Mapping[Key, str],
    overrides: Sequence[str] = (),
    optional: Collection[str] = (),
) -> R:
    """The part of a recipe that was named by the flags of a command, checked like those in a file.

    Args:
        value: ``{"data": {...}}``, say.
        model: of the part.
        flags: which flag each key comes from.
        overrides: as for `load_recipe`.
        optional: as for `load_recipe`.

    Raises:
        ConfigError: all faults together, each with its flag.
    """
    placed = Placed(value, dict(flags))
    problems = [problem for override in overrides for problem in _override(placed, override)]
    return _checked(placed, model, Path.cwd(), optional, problems)


def _checked(placed: Placed, model: type[R], beside: Path, optional: Collection[str], problems: list[str]) -> R:
    recipe, faults = _validate(placed, model)
    problems = problems + faults
    if recipe is not None:
        recipe, missing = locate(
            recipe, placed, beside, (*optional, *({"data.questions"} if model is IndexRecipe else ()))
        )
        problems += missing
    if problems or recipe is None:
        raise ConfigError(problems)
    return recipe


def find_recipe(path: str | Path, *folders: str) -> Path:
    """The file of a recipe: as named, or else a shipped one of that name, in the first of ``folders`` that has one.

    Raises:
        ConfigError: there is none.
    """
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        raise ConfigError(f"{path} is a directory; name a recipe in it, as in {file / 'NAME.yaml'}")
    return shipped.find(str(path), *folders)


def load_any(path: str | Path, overrides: Sequence[str] = ()) -> SamplingRecipe | TrainingRecipe | EvalRecipe:
    """Read a recipe of whatever stage its keys tell.

    Args:
        path: as for `load_recipe`.
        overrides: as for `load_recipe`; those of keys that the stage does not have are left to other recipes.

    Raises:
        ConfigError: as `stage_of` and `load_recipe`.
    """
    stage = stage_of(path)
    own = [override for override in overrides if _section(override) in stage.model_fields]
    if stage is SamplingRecipe:
        return load_recipe(path, SamplingRecipe, own)
    return load_recipe(path, TrainingRecipe, own) if stage is TrainingRecipe else load_recipe(path, EvalRecipe, own)


def load_all(
    paths: Sequence[str | Path], overrides: Sequence[str] = ()
) -> list[SamplingRecipe | TrainingRecipe | EvalRecipe]:
    """Read recipes of several stages; an override goes to each of them that has its first key.

    A short name that several stages have (``demo``) is of sampling where it comes first, and of another stage later.

    Raises:
        ConfigError: all faults of all recipes together, and overrides that none of them has a place for.
    """
    loaded, problems, known = [], [], set()
    for i, path in enumerate(paths):
        try:
            file = find_recipe(path, *(_FOLDERS.values() if i == 0 else ("training", "eval", "sampling")))
            known |= set(stage_of(file).model_fields)
            loaded.append(load_any(file, overrides))
        except ConfigError as error:
            problems += error.problems
    strange = [override for override in overrides if _section(override) not in known]
    if len(known) and strange:
        problems += [f"--set {override}: none of the recipes has {_section(override)!r}" for override in strange]
    if problems:
        raise ConfigError(problems)
    return loaded


def _section(override: str) -> str:
    return override.partition("=")[0].partition(".")[0].strip()


def stage_of(path: str | Path) -> type[SamplingRecipe] | type[TrainingRecipe] | type[EvalRecipe]:
    """Which stage a recipe is for, told from its keys.

    Raises:
        ConfigError: its keys fit none, or several.
    """
    file = find_recipe(path)
    keys = set(_read(file).value)
    own = {stage: keys & _only_of(stage) for stage in _FOLDERS}
    fits = [stage for stage, found in own.items() if found]
    if len(fits) != 1:
        raise ConfigError(
            f"{file}: cannot tell what this recipe is for (keys: {', '.join(sorted(keys)) or 'none'}); "
            "sampling has `data`, training has `algorithm`, evaluation has `systems` or `measures`"
        )
    return fits[0]  # type: ignore[return-value]


def _only_of(stage: type[BaseModel]) -> set[str]:
    """The keys that no other stage has."""
    others = {key for other in _FOLDERS if other is not stage for key in other.model_fields}
    return set(stage.model_fields) - others


def _read(file: Path) -> Placed:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not a text file in UTF-8 (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); mend it, or name another file") from error
    placed = parse(text, str(file))
    if placed.value is None:
        raise ConfigError(f"{file}: empty; `leret init` writes one for your own data")
    if not isinstance(placed.value, dict):
        kind = type(placed.value).__name__
        raise ConfigError(f"{file}:1: a recipe is made of `key: value` lines, this is a {kind}; write keys and values")
    return placed


def _refuse_other_stage(placed: Placed, model: type[BaseModel], file: Path) -> None:
    """One word instead of a list of all its keys, where the recipe is of another stage."""
    for stage, command in _COMMANDS.items():
        if stage is not model and not set(placed.value) & _only_of(model) and set(placed.value) & _only_of(stage):
            raise ConfigError(
                f"{file}: a recipe for `leret {command}`, not for `leret {_COMMANDS[model]}`; name the other"
            )


def _override(placed: Placed, override: str) -> list[str]:
    """Apply one ``a.b=c``; returns what is wrong with it."""
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        return [f"--set {override}: not of the form KEY=VALUE, as in --set sampling.samples=2"]
    try:
        value = parse(text, f"--set {name}").value
    except ConfigError as error:
        return [f"--set {override}: the value is not YAML ({error.problems[0]}); put it in quotes"]
    section = placed.value
    for depth, part in enumerate(parts[:-1]):
        inner = section.setdefault(part, {})
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            return [f"--set {override}: {'.'.join(parts[: depth + 1])} is {inner!r}, not a section; it has no keys"]
        placed.places.setdefault(tuple(parts[: depth + 1]), "--set")
        section = inner
    section[parts[-1]] = value
    key = tuple(parts)
    for known in [k for k in placed.places if k[: len(key)] == key]:
        del placed.places[known]
    placed.places[key] = "--set"
    return []


def _validate(placed: Placed, model: type[R]) -> tuple[R | None, list[str]]:
    """The recipe where it is one, and its faults; impossible combinations are looked for beside them."""
    try:
        recipe = model.model_validate(placed.value)
        faulty: list[Key] = []
        problems: list[str] = []
    except ValidationError as error:
        problems = [describe(detail, model, placed) for detail in error.errors()]
        faulty = [detail["loc"] for detail in error.errors()]
        rest = _without(placed.value, faulty)
        try:
            recipe = model.model_validate(rest)
        except ValidationError:
            return None, problems
    for clash in clashes(recipe):
        if not any(key[: len(bad)] == bad for key in clash.keys for bad in faulty):
            problems.append(f"{placed.at(clash.keys[0])}{clash.message}")
    return recipe, problems


def _without(value: Any, faulty: Sequence[Key], key: Key = ()) -> Any:
    """A copy of ``value`` without the keys that are ``faulty``."""
    if isinstance(value, dict):
        return {k: _without(v, faulty, (*key, k)) for k, v in value.items() if (*key, k) not in faulty}
    return value
