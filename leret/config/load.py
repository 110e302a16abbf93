"""Reads recipes from YAML files and overrides, and reports all faults together, each with its place.

A relative path is looked up in the current directory, the recipe's folder, the parent of that folder, and the folder of
the shipped recipes. One file may describe a whole run: a sampling recipe with the sections ``train`` (one training
recipe or a list) and ``eval``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from leret.config.base import RecipePath, Settings, locate_kinds, models_in, with_paths
from leret.config.evaluation import EvalRecipe
from leret.config.messages import (
    corrected,
    describe,
    fields_of,
    key_of,
    nearest,
    problems_of,
    sections,
)
from leret.config.sampling import SamplingRecipe
from leret.config.training import TrainingRecipe
from leret.core import bundled as shipped
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.core.yaml import Key, Placed, dotted, parse

Recipe = SamplingRecipe | TrainingRecipe | EvalRecipe
R = TypeVar("R", bound=Settings)
Clash = tuple[tuple[str, ...], str]
"""Dotted keys that conflict, starting with the key to fix, and a message."""
Check = Callable[[Any], Iterable[Clash]] | None
"""Finds unknown names in a recipe. Higher packages provide it, because they have the tables of known names."""

_FOLDERS: dict[Any, str] = {
    SamplingRecipe: "sampling",
    TrainingRecipe: "training",
    EvalRecipe: "eval",
}
_SECTIONS: dict[Any, str] = {TrainingRecipe: "train.", EvalRecipe: "eval."}
_STAGES = ("train", "eval")
"""Sections of a file that describes a whole run."""

_COMMANDS: dict[Any, str] = {SamplingRecipe: "sample", TrainingRecipe: "train", EvalRecipe: "eval"}


def load_recipe(
    path: str | Path,
    model: type[R],
    overrides: Sequence[str] = (),
    *,
    optional: Collection[str] = (),
    check: Check = None,
) -> R:
    """Read a YAML file or a shipped recipe, and make its paths absolute. ConfigError lists all faults.

    ``overrides`` (``a.b=c`` with a YAML value) replace values from the file. ``optional`` lists keys whose files may be
    missing (``policy.model`` if the command creates the model).
    """
    file = find_recipe(path, _FOLDERS[model], "sampling")  # which has those of whole runs
    parts = _parts(_read(file), file)
    recipes = [placed for stage, placed in parts if stage in {None, model}]
    if len(recipes) > 1:
        raise ConfigError(
            f"{file} has {len(recipes)} recipes for `leret {_COMMANDS[model]}`; run all with `leret run`"
        )
    if not recipes:
        stages = ", ".join(f"a recipe for `leret {_COMMANDS[stage]}`" for stage, _ in parts)
        raise ConfigError(
            f"{file} contains {stages}, not for `leret {_COMMANDS[model]}`; name another recipe"
        )
    return _checked(recipes[0], model, file.resolve().parent, overrides, optional, check)


def flag_recipe(
    value: dict[str, Any],
    flags: Mapping[str, str],
    overrides: Sequence[str] = (),
    optional: Collection[str] = (),
) -> SamplingRecipe:
    """Check a sampling recipe built from command-line flags. ``flags`` gives the flag for dotted keys of ``value``."""
    whole = {"program": {"adapter": {"kind": "compact"}}, **value}
    return flag_settings(SamplingRecipe, whole, flags, overrides, optional)


def flag_settings(
    model: type[R],
    value: dict[str, Any],
    flags: Mapping[str, str],
    overrides: Sequence[str] = (),
    optional: Collection[str] = (),
) -> R:
    """Check settings of any kind built from command-line flags, as `flag_recipe` does."""
    placed = Placed(value, {tuple(key.split(".")): flag for key, flag in flags.items()})
    return _checked(placed, model, Path.cwd(), overrides, optional)


def find_recipe(path: str | Path, *folders: str) -> Path:
    """Return ``path`` if the file exists, else the shipped recipe with this name in the first folder that has one."""
    file = Path(path)
    if file.is_dir():
        raise ConfigError(
            f"{path} is a directory; name a recipe in the directory, as in {file / 'NAME.yaml'}"
        )
    return file if file.is_file() else shipped.find(str(path), *folders)


def load_all(
    paths: Sequence[str | Path], overrides: Sequence[str] = (), check: Check = None
) -> list[Recipe]:
    """Read recipes of several stages. Overrides apply to all recipes with the key (``train.seed=1``: training only).

    A short name that several stages share (``demo``) means sampling if it comes first, and a later stage otherwise.
    """
    recipes: list[Recipe] = []
    problems: list[str] = []
    matched: set[str] = set()
    for i, path in enumerate(paths):
        try:
            file = find_recipe(
                path, *(_FOLDERS.values() if i == 0 else ("training", "eval", "sampling"))
            )
            parts = _parts(_read(file), file)
        except ConfigError as error:
            problems += error.problems
            continue
        for stage, placed in parts:
            try:
                if stage is None:
                    keys = ", ".join(sorted(placed.value)) or "none"
                    advice = "add `data` to sample, `algorithm` to train, or `systems` or `measures` to evaluate"
                    raise ConfigError(
                        f"{file}: the keys of this recipe ({keys}) do not identify its stage; {advice}"
                    )
                plain = {
                    override: override.removeprefix(_SECTIONS.get(stage, ""))
                    for override in overrides
                }
                fitting = {
                    override: key
                    for override, key in plain.items()
                    if _has_place(stage, placed.value, key, is_named=key != override)
                }
                matched |= set(fitting)
                recipes.append(
                    _checked(
                        placed, stage, file.resolve().parent, list(fitting.values()), (), check
                    )
                )
            except ConfigError as error:
                problems += error.problems
    if recipes or matched:
        problems += [_unmatched(override) for override in overrides if override not in matched]
    if problems:
        raise ConfigError(problems)
    return recipes


def _unmatched(override: str) -> str:
    """Return the message for an override whose key no recipe has."""
    name = override.removeprefix("train.").removeprefix("eval.").partition("=")[0]
    first = name.partition(".")[0].strip()
    keys: set[str] = set()
    for stage in _FOLDERS:
        keys.update(fields_of((stage, *models_in(stage))))
    return f"--set {override}: no recipe has key {first!r}{nearest(first, keys - {first})}; fix it"


def _has_place(stage: Any, value: Mapping[str, Any], override: str, is_named: bool) -> bool:
    """Return True if the stage has the override's first key.

    For ``data.KEY``, an evaluation must have KEY too. ``policies`` are those of sampling, unless the
    override names the stage (``is_named``).
    """
    first, *rest = (part.strip() for part in override.partition("=")[0].split("."))
    if first not in fields_of(sections(stage, (), value)):
        return False
    if first == "policies" and stage is not SamplingRecipe:
        return is_named
    if not rest or first != "data" or stage is SamplingRecipe:
        return True
    inner = fields_of(sections(stage, ("data",), value))
    return not inner or rest[0] in inner


def stage_of(value: Mapping[str, Any]) -> Any:
    """Return the recipe class of the only stage with one of the keys; None if no stage or several stages fit."""
    fits = set()
    for key in value:
        stages = [stage for stage in _FOLDERS if key in fields_of((stage, *models_in(stage)))]
        if len(stages) == 1:
            fits.add(stages[0])
    return fits.pop() if len(fits) == 1 else None


def _parts(placed: Placed, file: Path) -> list[tuple[Any, Placed]]:
    """Split a file into (stage, recipe) pairs; the stage is None if no key identifies it."""
    sampling = {name: value for name, value in placed.value.items() if name not in _STAGES}
    if len(sampling) == len(placed.value):
        return [(stage_of(sampling), placed)]
    trainings = placed.value.get("train", [])
    inner: list[tuple[Any, Key, Any]] = [(TrainingRecipe, ("train",), trainings)]
    if isinstance(trainings, list):
        inner = [(TrainingRecipe, ("train", i), training) for i, training in enumerate(trainings)]
    if "eval" in placed.value:
        inner.append((EvalRecipe, ("eval",), placed.value["eval"]))
    whole = Placed(sampling, placed.locations, placed.problems)
    parts: list[tuple[Any, Placed]] = [(SamplingRecipe, whole)] if sampling else []
    for stage, key, value in inner:
        if not isinstance(value, dict):
            raise ConfigError(
                f"{placed.label(key)}: {value!r} is not a recipe; write `key: value` lines"
            )
        inside = {
            path[len(key) :]: place
            for path, place in placed.locations.items()
            if path[: len(key)] == key
        }
        parts.append((stage, Placed(value, inside)))
    return parts


def _read(file: Path) -> Placed:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); name another file") from error
    placed = parse(text, str(file))
    if placed.value is None:
        raise ConfigError(f"{file}: empty file; write a recipe for your data with `leret init`")
    if not isinstance(placed.value, dict):
        kind = type(placed.value).__name__
        raise ConfigError(f"{file}:1: contains a {kind}, not a recipe; write `key: value` lines")
    return placed


def _checked(
    placed: Placed,
    model: type[R],
    folder: Path,
    overrides: Sequence[str],
    optional: Collection[str],
    check: Check = None,
) -> R:
    problems = list(placed.problems)
    for override in overrides:
        problems += _override(placed, override)
    folders = _folders(folder)
    placed.value = locate_kinds(placed.value, folders)
    placed, misspelled = corrected(placed, model, _STAGES if model is SamplingRecipe else ())
    problems += misspelled
    recipe, invalid, faulty = _validate(placed, model)
    problems += invalid
    if recipe is not None:
        recipe, missing = _with_absolute_paths(recipe, placed, folders, optional)
        refused: list[Clash] = list(check(recipe)) if check else []
        checked: set[Key] = set()
        for names, _ in refused:
            checked |= {tuple(name.split(".")) for name in names}
        problems += _messages(_clashes(recipe), placed, faulty | checked, optional)
        problems += _messages(refused, placed, faulty, optional)
        problems += missing
    if problems or recipe is None:
        raise ConfigError(problems)
    return recipe


def _override(placed: Placed, override: str) -> list[str]:
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        return [f"--set {override}: must have the form KEY=VALUE, as in --set sampling.samples=2"]
    try:
        value = parse(text, f"--set {name}").value
    except ConfigError as error:
        return [f"--set {override}: {error.problems[0]}; put the value in quotes"]
    section = placed.value
    for depth, part in enumerate(parts[:-1], 1):
        if section.get(part) is None:
            section[part] = {}
        if not isinstance(section[part], dict):
            return [
                f"--set {override}: {'.'.join(parts[:depth])} is {section[part]!r}, not a section; fix the key"
            ]
        placed.locations.setdefault(tuple(parts[:depth]), "--set")
        section = section[part]
    section[parts[-1]] = value
    key = tuple(parts)
    placed.locations = {
        k: place for k, place in placed.locations.items() if k[: len(key)] != key
    } | {key: "--set"}
    return []


def sampling_recipe_of(run: Run, made_by: str = "leret sample RECIPE") -> SamplingRecipe:
    """Return the run's recipe. RunError if command ``made_by`` has not run, or if run.yaml has unknown keys."""
    section = run.sampling(made_by)
    try:
        return SamplingRecipe.model_validate(section)
    except ValidationError as error:
        placed = Placed(section, {(): f"{run.manifest_path}: sampling"})
        faults = "; ".join(problems_of(error, SamplingRecipe, placed))
        raise RunError(
            f"{faults}; another version of leret wrote run.yaml, or it was edited; fix run.yaml"
        ) from error


def _validate(placed: Placed, model: type[R]) -> tuple[R | None, list[str], set[Key]]:
    """Return the recipe without faulty values (None if it is still invalid), messages, and the keys of these values."""
    problems: list[str] = []
    faulty: set[Key] = set()
    value = placed.value
    for whole in (False, False, True):
        try:
            recipe: R = model.model_validate(value)
            return recipe, problems, faulty
        except ValidationError as error:
            if not problems:
                problems = [describe(detail, model, placed) for detail in error.errors()]
            for detail in error.errors():
                key = key_of(detail, placed.value)
                if detail["type"].startswith("union_tag"):
                    key = key[:-1]  # without its kind, no key of the section is valid
                faulty.add(key[:1] if whole else key)
            value = _without(placed.value, faulty)
    return None, problems, faulty


def _messages(
    clashes: Iterable[Clash], placed: Placed, faulty: Collection[Key], optional: Collection[str]
) -> Iterator[str]:
    """Yield messages about the clashes of which no key is faulty and the first is not optional."""
    for names, message in clashes:
        keys: list[Key] = [tuple(name.split(".")) for name in names]
        if names[0] in optional or any(_is_inside(key, faulty) for key in keys):
            continue
        yield f"{placed.label(keys[0])}: {message}"


def _is_inside(key: Key, sections: Collection[Key]) -> bool:
    return any(key[: len(section)] == section for section in sections)


def _clashes(recipe: Settings) -> Iterator[Clash]:
    if isinstance(recipe, SamplingRecipe):
        yield from _sampling_clashes(recipe)
    elif isinstance(recipe, TrainingRecipe):
        if recipe.warmup_ratio and recipe.lr_scheduler_type == "constant":
            advice = "lr_scheduler_type constant has no warm-up; set constant_with_warmup, or remove warmup_ratio"
            yield ("warmup_ratio", "lr_scheduler_type"), advice
        if recipe.init_from == recipe.policy_name:
            yield (
                ("init_from", "name"),
                f"{recipe.init_from} would start from itself; set another `name`",
            )
    elif isinstance(recipe, EvalRecipe) and recipe.samples > 1 and recipe.temperature == 0:
        yield (
            ("samples", "temperature"),
            f"is {recipe.samples}, but temperature 0 gives identical runs; set samples: 1",
        )


def _sampling_clashes(recipe: SamplingRecipe) -> Iterator[Clash]:
    data = recipe.data
    policy = recipe.policy
    settings = recipe.sampling
    adapter = recipe.program.adapter.kind
    n_few_shot = settings.n_few_shot
    bank = settings.bank
    if not data.brings_documents and not data.corpus_file and recipe.retriever.needs_corpus:
        picks = (
            ""
            if data.kind in {"jsonl", "hover"}
            else ", or set retriever.kind: none if the program only picks"
        )
        message = f"missing; kind {data.kind} has only questions, but retriever {recipe.retriever.kind} needs a corpus"
        yield ("data.corpus", "data.kind", "retriever.kind"), f"{message}; add a corpus file{picks}"
    if policy.kind == "local" and policy.model in shipped.SCOPES and adapter != "compact":
        message = f"is {adapter}, but policy.model {policy.model} only reads compact prompts; change one of the two"
        yield ("program.adapter.kind", "policy.model"), message
    if settings.prompts * settings.samples < 2:
        message = "one completion per state leaves nothing to compare; raise sampling.prompts or sampling.samples"
        yield ("sampling.samples", "sampling.prompts"), message
    if settings.hint and settings.prompts == 1:
        message = "is 1, but the zero-shot prompt shows no hint; raise it, or remove sampling.hint"
        yield ("sampling.prompts", "sampling.hint"), message
    if policy.temperature == 0 and settings.samples > 1:
        message = f"policy.temperature 0 gives {settings.samples} identical samples; raise it, or set samples: 1"
        yield ("sampling.samples", "policy.temperature"), message
    if settings.margin and settings.strategy != "margin":
        message = f"strategy {settings.strategy} ignores this key; set sampling.strategy: margin, or remove the key"
        yield ("sampling.margin", "sampling.strategy"), message
    if bank.candidates is not None and n_few_shot > bank.candidates:
        message = f"needs {n_few_shot} few-shot prompts; raise sampling.bank.candidates (now {bank.candidates})"
        yield ("sampling.prompts", "sampling.bank.candidates"), message


def _without(value: Any, faulty: Collection[Key], key: Key = ()) -> Any:
    if isinstance(value, dict):
        return {
            k: _without(v, faulty, (*key, k)) for k, v in value.items() if (*key, k) not in faulty
        }
    return value


def _with_absolute_paths(
    recipe: R, placed: Placed, folders: Sequence[Path], optional: Collection[str]
) -> tuple[R, list[str]]:
    problems: list[str] = []
    pretrained = getattr(recipe, "pretrain", None) is not None

    def absolute(key: Key, text: str, mark: RecipePath) -> str:
        is_pretrained = pretrained and key == ("policy", "model")
        if _is_name(text, mark) and (not is_pretrained or text in mark.names):
            return text
        for start in folders if text else ():
            path = start / Path(text).expanduser()
            if path.exists():
                return str(path.resolve())
        if mark.may_be_missing or dotted(key) in optional:
            return str(Path(text).absolute())
        advice = (
            "run `python -m models pretrain` on this recipe in a checkout of leret first, or fix the path"
            if is_pretrained
            else mark.advice
        )
        problems.append(
            f"{placed.label(key)}: no {mark.noun} {text!r} here or next to the recipe"
            f"{nearest(text, mark.names)}; {advice}"
        )
        return text

    return with_paths(recipe, absolute), problems


def _folders(folder: Path) -> tuple[Path, ...]:
    """Return the folders in which a recipe in ``folder`` finds files."""
    return Path.cwd(), folder, folder.parent, shipped.ROOT


def _is_name(text: str, mark: RecipePath) -> bool:
    """Return True for names that are not paths: ``demo``, ``hf:NAME``, or ``owner/name`` without a folder ``owner``."""
    if text in mark.names or text.startswith("hf:"):
        return True
    owner, _, name = text.partition("/")
    return (
        mark.hub
        and bool(name)
        and "/" not in name
        and owner not in {"", ".", "..", "~"}
        and not Path(owner).exists()
    )
