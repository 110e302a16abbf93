"""Reading a recipe: YAML, overrides and files, with every fault listed at once and its place beside it.

``load_recipe("sampling/demo.yaml", SamplingRecipe, ["sampling.samples=2"])`` gives the frozen model of `leret.config`,
with the paths in it made absolute. A relative path is looked for in the current directory, in the recipe's folder, in
the folder around that, and at last among what leret ships.

A file may hold a whole run: a sampling recipe with the sections ``train`` (a training, or a list of them) and ``eval``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from leret.config.base import RecipePath, models_in, with_paths
from leret.config.data import QUESTIONS_ALONE
from leret.config.evaluation import EvalRecipe
from leret.config.messages import describe, key_of, sections
from leret.config.sampling import SamplingRecipe
from leret.config.training import TrainingRecipe
from leret.core import bundled as shipped
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.core.yaml import Key, Placed, dotted, parse

Recipe = SamplingRecipe | TrainingRecipe | EvalRecipe
R = TypeVar("R", SamplingRecipe, TrainingRecipe, EvalRecipe)
Clash = tuple[tuple[str, ...], str]
"""Dotted keys that take part, the one to mend first, and what is wrong with it."""
Check = Callable[[Recipe], Iterable[Clash]] | None
"""What only other packages know to be wrong with a recipe: names that their tables lack."""

_FOLDERS: dict[Any, str] = {SamplingRecipe: "sampling", TrainingRecipe: "training", EvalRecipe: "eval"}
_SECTIONS: dict[Any, str] = {TrainingRecipe: "train.", EvalRecipe: "eval."}
_COMMANDS: dict[Any, str] = {SamplingRecipe: "sample", TrainingRecipe: "train", EvalRecipe: "eval"}


def load_recipe(
    path: str | Path,
    model: type[R],
    overrides: Sequence[str] = (),
    *,
    optional: Collection[str] = (),
    check: Check = None,
) -> R:
    """Read a recipe: a YAML file, or the name of a shipped one; a ConfigError lists all faults with their places.

    ``overrides`` (``a.b=c``; the value is YAML) win over the file. What the keys ``optional`` name may be missing
    (``policy.model`` when it is about to be made).
    """
    file = find_recipe(path, _FOLDERS[model])
    parts = _parts(_read(file), file)
    own = [placed for stage, placed in parts if stage in {None, model}]
    if len(own) > 1:
        raise ConfigError(f"{file}: {len(own)} recipes for `leret {_COMMANDS[model]}`; `leret run` takes them all")
    if not own:
        holds = ", ".join(f"a recipe for `leret {_COMMANDS[stage]}`" for stage, _ in parts)
        raise ConfigError(f"{file}: {holds}, not for `leret {_COMMANDS[model]}`; name the other")
    return _checked(own[0], model, file.resolve().parent, overrides, optional, check)


def flag_recipe(
    value: dict[str, Any], flags: Mapping[str, str], overrides: Sequence[str] = (), optional: Collection[str] = ()
) -> SamplingRecipe:
    """A sampling recipe of which some keys were named by the flags of a command, checked like one in a file.

    ``flags`` says which flag each dotted key of ``value`` comes from; the rest is as in a recipe for the demo's policy.
    """
    whole = {"program": {"adapter": {"kind": "compact"}}, **value}
    placed = Placed(whole, {tuple(key.split(".")): flag for key, flag in flags.items()})
    return _checked(placed, SamplingRecipe, Path.cwd(), overrides, optional)


def find_recipe(path: str | Path, *folders: str) -> Path:
    """The file of a recipe: as named, or else a shipped one of that name, in the first of ``folders`` that has one."""
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"{path} is a directory; name a recipe in it, as in {file / 'NAME.yaml'}")
    return file if file.is_file() else shipped.find(str(path), *folders)


def load_all(paths: Sequence[str | Path], overrides: Sequence[str] = (), check: Check = None) -> list[Recipe]:
    """Read recipes of several stages; an override goes to each that has its key, ``train.seed=1`` to trainings alone.

    A short name that several stages have (``demo``) is of sampling where it comes first, and of another stage later.
    All faults of all recipes are listed together, with overrides that none of them has a place for.
    """
    loaded: list[Recipe] = []
    problems: list[str] = []
    taken: set[str] = set()
    for i, path in enumerate(paths):
        try:
            file = find_recipe(path, *(_FOLDERS.values() if i == 0 else ("training", "eval", "sampling")))
            parts = _parts(_read(file), file)
        except ConfigError as error:
            problems += error.problems
            continue
        for stage, placed in parts:
            try:
                if stage is None:
                    keys = ", ".join(sorted(placed.value)) or "none"
                    raise ConfigError(
                        f"{file}: cannot tell what this recipe is for (keys: {keys}); "
                        "sampling has `data`, training has `algorithm`, evaluation has `systems` or `measures`"
                    )
                plain = {override: override.removeprefix(_SECTIONS.get(stage, "")) for override in overrides}
                own = {override: key for override, key in plain.items() if _has_place(stage, placed.value, key)}
                taken |= set(own)
                loaded.append(_checked(placed, stage, file.resolve().parent, list(own.values()), (), check))
            except ConfigError as error:
                problems += error.problems
    strange = [override for override in overrides if override not in taken] if loaded or taken else []
    problems += [f"--set {override}: none of the recipes has {override.split('.')[0]!r}" for override in strange]
    if problems:
        raise ConfigError(problems)
    return loaded


def _has_place(stage: Any, value: Mapping[str, Any], override: str) -> bool:
    """Whether a recipe of this stage has an override's first key, and of ``data``, which two stages have, the next."""
    first, *rest = (part.strip() for part in override.partition("=")[0].split("."))
    known = {key for one in sections(stage, (), value) for key in one.model_fields}
    of_data = (
        {key for one in sections(stage, ("data",), value) for key in one.model_fields} if first == "data" else set()
    )
    return first in known and (not rest or not of_data or rest[0] in of_data or stage is SamplingRecipe)


def stage_of(value: Mapping[str, Any]) -> Any:
    """The class of a recipe: the only stage that some keys are of; None where there is none, or more than one."""
    keys = {stage: {key for kind in (stage, *models_in(stage)) for key in kind.model_fields} for stage in _FOLDERS}
    fits = []
    for stage, own in keys.items():
        others = {key for other in keys if other is not stage for key in keys[other]}
        if set(value) & (own - others):
            fits.append(stage)
    return fits[0] if len(fits) == 1 else None


def _parts(placed: Placed, file: Path) -> list[tuple[Any, Placed]]:
    """The stages that a file has a recipe for, each with it; None where no key tells the only one."""
    own = {name: value for name, value in placed.value.items() if name not in {"train", "eval"}}
    if len(own) == len(placed.value):
        return [(stage_of(own), placed)]
    trainings = placed.value.get("train", [])
    found: list[tuple[Any, Key, Any]] = [(TrainingRecipe, ("train",), trainings)]
    if isinstance(trainings, list):
        found = [(TrainingRecipe, ("train", i), one) for i, one in enumerate(trainings)]
    if "eval" in placed.value:
        found.append((EvalRecipe, ("eval",), placed.value["eval"]))
    parts: list[tuple[Any, Placed]] = [(SamplingRecipe, Placed(own, placed.places, placed.problems))] if own else []
    for stage, key, value in found:
        if not isinstance(value, dict):
            raise ConfigError(f"{placed.at(key)}{dotted(key)}: {value!r} is no recipe; write its keys and values")
        places = {other[len(key) :]: place for other, place in placed.places.items() if other[: len(key)] == key}
        parts.append((stage, Placed(value, places)))
    return parts


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


def _checked(
    placed: Placed,
    model: type[R],
    beside: Path,
    overrides: Sequence[str],
    optional: Collection[str],
    check: Check = None,
) -> R:
    problems = [*placed.problems, *(fault for override in overrides for fault in _override(placed, override))]
    recipe, faults = _validate(placed, model, check, optional)
    problems += faults
    if recipe is not None:
        recipe, missing = _located(recipe, placed, beside, optional)
        problems += missing
    if problems or recipe is None:
        raise ConfigError(problems)
    return recipe


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
        if section.get(part) is None:
            section[part] = {}
        if not isinstance(section[part], dict):
            here = ".".join(parts[: depth + 1])
            return [f"--set {override}: {here} is {section[part]!r}, not a section; it has no keys"]
        placed.places.setdefault(tuple(parts[: depth + 1]), "--set")
        section = section[part]
    section[parts[-1]] = value
    key = tuple(parts)
    placed.places = {k: place for k, place in placed.places.items() if k[: len(key)] != key} | {key: "--set"}
    return []


def sampling_recipe_of(run: Run, made_by: str = "leret sample RECIPE") -> SamplingRecipe:
    """The recipe that a run was sampled with, by the command ``made_by``.

    Raises:
        RunError: it was not sampled, or its run.yaml has keys that this version does not have.
    """
    section = run.section("sampling", made_by)
    try:
        return SamplingRecipe.model_validate(section)
    except ValidationError as error:
        placed = Placed(section, {(): f"{run.manifest_path}: sampling"})
        faults = "; ".join(describe(detail, SamplingRecipe, placed) for detail in error.errors())
        raise RunError(f"{faults}; another version of leret wrote it, or it was edited: mend it there") from error


def _validate(placed: Placed, model: type[R], check: Check, optional: Collection[str]) -> tuple[R | None, list[str]]:
    """The recipe where it is one, and its faults.

    Where some values are faulty, the rest is validated without them, for impossible combinations and missing files.
    """
    problems: list[str] = []
    faulty: set[Key] = set()
    value = placed.value
    for whole in (False, False, True):
        try:
            recipe: R = model.model_validate(value)
            break
        except ValidationError as error:
            if not problems:
                problems = [describe(detail, model, placed) for detail in error.errors()]
            keys = {key_of(detail, placed.value) for detail in error.errors()}
            faulty |= {key[:1] for key in keys} if whole else keys
            value = _without(placed.value, faulty)
    else:
        return None, problems
    for names, message in (*_clashes(recipe), *(check(recipe) if check else ())):
        parts = [tuple(name.split(".")) for name in names]
        if names[0] not in optional and not any(part[: len(bad)] == bad for part in parts for bad in faulty):
            problems.append(f"{placed.at(parts[0])}{names[0]}: {message}")
    return recipe, problems


def _clashes(recipe: Recipe) -> Iterator[Clash]:
    """Every impossible combination of a recipe whose single values are valid."""
    if isinstance(recipe, SamplingRecipe):
        yield from _clashes_of_sampling(recipe)
    elif isinstance(recipe, TrainingRecipe):
        if recipe.warmup_ratio and recipe.lr_scheduler_type == "constant":
            mend = "lr_scheduler_type constant has no warm-up; set constant_with_warmup, or remove it"
            yield ("warmup_ratio", "lr_scheduler_type"), mend
        if recipe.init_from == recipe.policy_name:
            yield ("init_from", "name"), f"{recipe.init_from} would start from itself; give the new policy a name"
    elif recipe.samples > 1 and recipe.temperature == 0:
        runs = f"at temperature 0 the {recipe.samples} runs of a question are the same; set samples: 1"
        yield ("samples", "temperature"), runs


def _clashes_of_sampling(recipe: SamplingRecipe) -> Iterator[Clash]:
    data, policy, settings, adapter = recipe.data, recipe.policy, recipe.sampling, recipe.program.adapter.kind
    if data.kind in QUESTIONS_ALONE and not data.corpus and recipe.retriever.needs_corpus:
        told = f"missing; kind {data.kind} has questions alone, and retriever {recipe.retriever.kind} needs a corpus"
        told += "" if data.kind in {"jsonl", "hover"} else "; where the program only picks, set retriever.kind: none"
        yield ("data.corpus", "data.kind", "retriever.kind"), told
    if policy.kind == "local" and policy.model in shipped.POLICIES and adapter != "compact":
        told = f"policy.model {policy.model} reads only prompts of kind compact, not {adapter}; set it, or name another"
        yield ("program.adapter.kind", "policy.model"), told
    if settings.prompts * settings.samples < 2:
        told = "one prompt and one sample give one completion a state, and nothing to compare it with"
        yield ("sampling.samples", "sampling.prompts"), f"{told}; raise sampling.prompts or sampling.samples"
    if policy.temperature == 0 and settings.samples > 1:
        told = f"at policy.temperature 0 the {settings.samples} samples of a prompt are the same; raise it, or set 1"
        yield ("sampling.samples", "policy.temperature"), told
    if settings.margin and settings.strategy != "margin":
        told = f"strategy {settings.strategy} takes none; set sampling.strategy: margin, or remove it"
        yield ("sampling.margin", "sampling.strategy"), told
    if settings.prompts - 1 > settings.bank.candidates:
        told = f"{settings.prompts - 1} few-shot prompts cannot be the best of {settings.bank.candidates} candidates"
        yield ("sampling.prompts", "sampling.bank.candidates"), f"{told}; raise sampling.bank.candidates"


def _without(value: Any, faulty: Collection[Key], key: Key = ()) -> Any:
    """A copy of ``value`` without the keys that are ``faulty``."""
    if isinstance(value, dict):
        return {k: _without(v, faulty, (*key, k)) for k, v in value.items() if (*key, k) not in faulty}
    return value


def _located(recipe: R, placed: Placed, beside: Path, optional: Collection[str]) -> tuple[R, list[str]]:
    """The recipe with absolute paths, and one line for each file that is missing."""
    problems: list[str] = []
    folders = (Path.cwd(), beside, beside.parent, shipped.root())
    pretrained = getattr(recipe, "pretrain", None) is not None

    def found(key: Key, given: str, mark: RecipePath) -> str:
        made_here = pretrained and key == ("policy", "model")
        if _is_name(given, mark) and (not made_here or given in mark.names):
            return given
        for folder in folders if given else ():
            path = folder / Path(given).expanduser()
            if path.exists():
                return str(path.resolve())
        if mark.may_be_missing or dotted(key) in optional:
            return str(Path(given).absolute())
        mend = "`leret pretrain` this recipe first, or correct the path" if made_here else mark.mend
        problems.append(f"{placed.at(key)}{dotted(key)}: no {mark.what} {given!r} here or beside the recipe; {mend}")
        return given

    return with_paths(recipe, found), problems


def _is_name(given: str, mark: RecipePath) -> bool:
    """Whether a value is a name and no path: ``demo``, ``hf:NAME``, or ``owner/name`` where no such folder is here."""
    if given in mark.names or given.startswith("hf:"):
        return True
    owner, _, name = given.partition("/")
    return (
        mark.hub and bool(name) and "/" not in name and owner not in {"", ".", "..", "~"} and not Path(owner).exists()
    )
