"""Turns pydantic errors into messages with the place, key and value, and advice."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from leret.config.base import TAGS, KindSettings, is_kind, models_in, names_of
from leret.core.classes import is_path, load_named
from leret.core.errors import ConfigError
from leret.core.yaml import Key, Placed, dotted

M = TypeVar("M", bound=BaseModel)

_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "tuple": "a list",
          "dict": "a mapping", "list": "a list"}  # fmt: skip
_BOUNDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda c: f"greater than {c['gt']}",
    "greater_than_equal": lambda c: f"at least {c['ge']}",
    "less_than": lambda c: f"less than {c['lt']}",
    "less_than_equal": lambda c: f"at most {c['le']}",
}


def describe(detail: Mapping[str, Any], model: type[BaseModel], placed: Placed) -> str:
    """Format one of ``ValidationError.errors()`` as ``file.yaml:12: policy.top_p: must be at most 1, got 2``."""
    key = key_of(detail, placed.value)
    message = str(detail.get("ctx", {}).get("error", ""))
    # from leret's validators, which may name the key themselves
    if detail["type"] == "value_error":
        names_key = not key or str(key[0]) in message
        return f"{placed.at(key)}{message}" if names_key else f"{placed.label(key)}: {message}"
    return f"{placed.label(key)}: {_fault(detail, key, model, placed.value)}"


def validated(model: type[M], values: Mapping[str, Any], label: str) -> M:
    """Return values as a model; a ConfigError lists all invalid keys, with ``label`` before each."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(problems_of(error, model, Placed(dict(values), {(): label}))) from None


def key_of(detail: Mapping[str, Any], value: Any) -> Key:
    """Return an error's key as written in the recipe, without the kinds that pydantic adds to the location."""
    key: list[str | int] = []
    location = detail["loc"]
    was_kind = False
    for n, part in enumerate(location):
        is_last = n == len(location) - 1
        if (
            not (was_kind or is_last)
            and isinstance(value, Mapping)
            and part in map(value.get, TAGS)
        ):
            # pydantic's own part, which can also be a key of the section (kind: features)
            was_kind = True
            continue
        was_kind = False
        inside = isinstance(value, Mapping) and part in value
        if inside or (
            isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        ):
            value = value[part]
            key.append(part)
        elif detail["type"] == "missing" and is_last:
            key.append(part)
    if detail["type"].startswith("union_tag"):
        key.append(detail["ctx"]["discriminator"].strip("'"))
    return tuple(key)


def _fault(detail: Mapping[str, Any], key: Key, model: type[BaseModel], recipe: Any) -> str:
    kind = detail["type"]
    value = detail["input"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(key, model, recipe)
    if kind == "missing":
        return f"missing; add it{_hint(model, key, recipe)}"
    if kind == "union_tag_not_found":
        return "missing; add it"
    if kind in {"literal_error", "union_tag_invalid"}:
        value = context.get("tag", value)
        allowed = re.findall(
            r"'([^']*)'|\b(\d+)\b", context.get("expected_tags") or context["expected"]
        )
        names = [word or number for word, number in allowed]
        return f"{value!r} is not one of {', '.join(names)}{nearest(str(value), names)}"
    if kind == "union_tag_path":
        return str(context["reason"])
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind](context)}, got {value!r}"
    if kind in {"model_type", "model_attributes_type"}:
        return f"must be a section with keys, got {value!r}; write the keys below, indented"
    expected = _KINDS.get(kind.split("_")[0])
    if expected and not any(word in kind for word in ("pattern", "too_")):
        return f"must be {expected}, got {value!r}"
    return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, got {value!r}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean recall?``, or an empty string if no name is similar."""
    near = closest(name, names)
    return f"; did you mean {near}?" if near else ""


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to ``name``, without regard to case, or None if none is similar.

    >>> closest("MAP", ["recall", "ap"])
    'ap'
    """
    by_lower = {candidate.lower(): candidate for candidate in names}
    lower = name.lower()
    for candidate, original in by_lower.items():  # k2 is a misspelled k1, not a misspelled k
        if lower[-1:].isdigit() and candidate[-1:].isdigit() and candidate[:-1] == lower[:-1]:
            return original
    near = get_close_matches(lower, by_lower, 1)
    return by_lower[near[0]] if near else None


def corrected(
    placed: Placed, model: type[BaseModel], more: Collection[str] = ()
) -> tuple[Placed, list[str]]:
    """Return a recipe with misspelled keys and kinds corrected, and a message for each, so that a typo is one problem.

    ``more`` are top-level keys besides those of ``model``. A key that resembles no other key stays unchanged.
    """
    problems: list[str] = []
    while True:
        try:
            model.model_validate(placed.value)
            return placed, problems
        except ValidationError as error:
            details = [_typo(detail, model, placed, more) for detail in error.errors()]
        typos = [typo for typo in details if typo is not None]
        kinds = [typo for typo in typos if typo[1] in TAGS]  # the kind decides which keys are known
        right_keys = placed
        messages = []
        for key, right, value, message in kinds or typos:
            messages.append(f"{right_keys.at(key)}{dotted(key)}: {message}")
            right_keys = _replaced(right_keys, key, right, value, more)
        if right_keys.value == placed.value:
            return placed, problems
        problems += messages
        placed = right_keys


def _typo(
    detail: Mapping[str, Any], model: type[BaseModel], placed: Placed, more: Collection[str]
) -> tuple[Key, str, Any, str] | None:
    """Return a misspelled key, the right name, the right value and a message; None for an error of another kind."""
    key = key_of(detail, placed.value)
    section = key[:-1]
    name = str(key[-1]) if key else ""
    written = _at(placed.value, section)
    if detail["type"] == "union_tag_invalid":
        message = _fault(detail, key, model, placed.value)
        near = closest(str(written[name]), re.findall(r"'([^']*)'", detail["ctx"]["expected_tags"]))
        return None if near is None else (key, name, near, message)
    if detail["type"] == "union_tag_not_found":
        wrong = closest(name, written)
        right: str | None = name
    elif detail["type"] == "extra_forbidden" and not _kinds_with(
        name, section, model, placed.value
    ):
        wrong = name
        names = fields_of(sections(model, section, placed.value))
        if not section:
            names += more
        right = closest(name, names)
    else:
        return None
    if wrong is None or right is None:
        return None
    return (
        (*section, wrong),
        right,
        written[wrong],
        f"unknown key; did you mean {dotted((*section, right))}?",
    )


def _replaced(placed: Placed, key: Key, right: str, item: Any, more: Collection[str]) -> Placed:
    """Return a recipe with another name and value for a key. If it has the right key too, sections are joined."""
    value = deepcopy(placed.value)
    section = _at(value, key[:-1])
    del section[key[-1]]
    if isinstance(item, dict) and isinstance(section.get(right), dict):
        section[right] = item | section[right]
    elif right not in more:
        section.setdefault(right, item)
    renamed = {
        (*key[:-1], right, *k[len(key) :]): at
        for k, at in placed.locations.items()
        if k[: len(key)] == key
    }
    return Placed(value, renamed | placed.locations, placed.problems)


def _at(value: Any, key: Key) -> Any:
    for part in key:
        value = value[part]
    return value


def problems_of(error: ValidationError, model: type[BaseModel], placed: Placed) -> list[str]:
    """List the problems of a value that failed validation; a misspelled key is one problem."""
    placed, problems = corrected(placed, model)
    try:
        model.model_validate(placed.value)
    except ValidationError as remaining:
        problems += [describe(detail, model, placed) for detail in remaining.errors()]
    return problems


def _unknown(key: Key, model: type[BaseModel], recipe: Any) -> str:
    section = key[:-1]
    name = str(key[-1])
    kinds = _kinds_with(name, section, model, recipe)
    if kinds:
        return f"unknown key for this kind (known for {', '.join(kinds)}); remove it"
    elsewhere = [path for path in _all_keys(model) if path[-1] == name]
    if elsewhere:
        return f"unknown key in this section; did you mean {dotted(elsewhere[0])}?"
    return f"unknown key; available: {', '.join(fields_of(sections(model, section, recipe)))}"


def _kinds_with(name: str, section: Key, model: type[BaseModel], recipe: Any) -> list[str]:
    """Return the kinds of a section that have a key."""
    kinds = []
    for owner in sections(model, section, recipe, any_kind=True):
        tag = owner.model_fields.get(_tag(owner))
        if name in owner.model_fields and tag is not None:
            kinds.append(tag.default)
    return kinds


def sections(model: Any, key: Key, value: Any, *, any_kind: bool = False) -> list[type[BaseModel]]:
    """Return the settings classes of the section at a key: for the kind in the recipe, or with ``any_kind`` for all."""
    annotation = model
    for part in key:
        if isinstance(part, int):  # `models_in` looks into lists
            value = value[part]
            continue
        fields = [
            settings.model_fields[part]
            for settings in _of_kind(list(models_in(annotation)), value)
            if part in settings.model_fields
        ]
        annotation = _values_of(annotation) or next((field.annotation for field in fields), None)
        value = value.get(part) if isinstance(value, Mapping) else None
    models = list(models_in(annotation))
    return models if any_kind else _of_kind(models, value)


def _of_kind(models: list[type[BaseModel]], value: Any) -> list[type[BaseModel]]:
    """Return the settings classes for the kind of a section, or all if none is for this kind."""
    if not models or not isinstance(value, Mapping):
        return models
    kind = value.get(_tag(models[0]), getattr(models[0], "default_kind", None))
    if isinstance(kind, str) and is_path(kind):
        return _at_path(kind) or models
    fitting = [_version(model, value) for model in models if kind in names_of(model)]
    without_kind = [model for model in models if not names_of(model)]
    return fitting or without_kind or models


def _version(model: Any, value: Mapping[str, Any]) -> type[BaseModel]:
    try:
        return model.version(value) if issubclass(model, KindSettings) else model  # type: ignore[no-any-return]
    except ConfigError:
        return model  # type: ignore[no-any-return]


def _at_path(kind: str) -> list[type[BaseModel]]:
    try:
        return [load_named(kind, "kind", is_kind).settings]
    except ConfigError:
        return []


def _tag(model: type[BaseModel]) -> str:
    return getattr(model, "tag", "kind")


def fields_of(models: Iterable[type[BaseModel]]) -> list[str]:
    """Return the keys of all settings classes, sorted."""
    names: set[str] = set()
    for model in models:
        names |= set(model.model_fields)
    return sorted(names)


def _values_of(annotation: Any) -> Any:
    """Return the type of a mapping's values (``X`` for ``dict[str, X] | None``), or None for other types."""
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    for part in get_args(annotation):
        values = _values_of(part)
        if values is not None:
            return values
    return None


def _all_keys(model: Any, around: Key = ()) -> list[Key]:
    keys: list[Key] = []
    for settings in models_in(model):
        for name, field in settings.model_fields.items():
            keys += [(*around, name), *_all_keys(field.annotation, (*around, name))]
    return keys


def _hint(model: type[BaseModel], key: Key, recipe: Any) -> str:
    name = str(key[-1])
    for settings in sections(model, key[:-1], recipe):
        if name in settings.model_fields:
            description = settings.model_fields[name].description
            return f" ({description})" if description else ""
    return ""
