"""Turns pydantic errors into messages with the place, key and value, and advice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from leret.config.base import models_in
from leret.config.spelling import closest, corrected, field_of, fields_of, of_kind, tag_of, unknown_name, values_of
from leret.core.yaml import Key, Placed, dotted

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
    key, message = key_of(detail, placed.value), str(detail.get("ctx", {}).get("error", ""))
    if detail["type"] == "value_error":  # from leret's validators, which may name the key themselves
        names_key = not key or str(key[0]) in message
        return f"{placed.at(key)}{message}" if names_key else f"{placed.label(key)}: {message}"
    return f"{placed.label(key)}: {_fault(detail, key, model, placed.value)}"


def key_of(detail: Mapping[str, Any], value: Any) -> Key:
    """Return an error's key as written in the recipe, without the kinds that pydantic adds to the location."""
    key: list[str | int] = []
    location = detail["loc"]
    was_kind = False
    for n, part in enumerate(location):
        is_last = n == len(location) - 1
        if not (was_kind or is_last) and isinstance(value, Mapping) and part in _tags(value):
            was_kind = True  # pydantic's own part, which can also be a key of the section (kind: features)
            continue
        was_kind = False
        inside = isinstance(value, Mapping) and part in value
        if inside or (isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)):
            value = value[part]
            key.append(part)
        elif detail["type"] == "missing" and is_last:
            key.append(part)
    if detail["type"].startswith("union_tag"):
        key.append(detail["ctx"]["discriminator"].strip("'"))
    return tuple(key)


def _tags(value: Mapping[str, Any]) -> list[Any]:
    return [value.get("kind"), value.get("algorithm")]


def _fault(detail: Mapping[str, Any], key: Key, model: type[BaseModel], recipe: Any) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(key, model, recipe)
    if kind in {"missing", "union_tag_not_found"}:
        return f"missing; add it{_hint(model, key, recipe) if kind == 'missing' else ''}"
    if kind in {"literal_error", "union_tag_invalid"}:
        value = context.get("tag", value)
        allowed = re.findall(r"'([^']*)'|\b(\d+)\b", context.get("expected_tags") or context["expected"])
        return unknown_name(value, [word or number for word, number in allowed])
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind](context)}, got {value!r}"
    if kind in {"model_type", "model_attributes_type"}:
        return f"must be a section with keys, got {value!r}; write the keys below, indented"
    expected = _KINDS.get(kind.split("_")[0])
    if expected and not any(word in kind for word in ("pattern", "too_")):
        return f"must be {expected}, got {value!r}"
    return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, got {value!r}"


def problems_of(error: ValidationError, model: type[BaseModel], placed: Placed) -> list[str]:
    """List the problems of a value that failed validation; a misspelled key is one problem."""
    spelled, problems = corrected(placed, model)
    try:
        model.model_validate(spelled.value)
    except ValidationError as remaining:
        problems += [describe(detail, model, spelled) for detail in remaining.errors()]
    return problems or [describe(detail, model, placed) for detail in error.errors()]


def _unknown(key: Key, model: type[BaseModel], recipe: Any) -> str:
    section, name = key[:-1], str(key[-1])
    known = fields_of(sections(model, section, recipe))
    owners = [owner for owner in sections(model, section, recipe, any_kind=True) if name in owner.model_fields]
    kinds = [owner.model_fields[tag_of(owner)].default for owner in owners if tag_of(owner) in owner.model_fields]
    if kinds:
        return f"unknown key for this kind (known for {', '.join(kinds)}); remove it"
    near = closest(name, known)
    if near is not None:
        return f"unknown key; did you mean {dotted((*section, near))}?"
    elsewhere = [path for path in _all_keys(model) if path[-1] == name]
    if elsewhere:
        return f"unknown key in this section; did you mean {dotted(elsewhere[0])}?"
    return f"unknown key; available: {', '.join(known)}"


def sections(model: Any, key: Key, value: Any, *, any_kind: bool = False) -> list[type[BaseModel]]:
    """Return the settings classes of the section at a key: for the kind in the recipe, or with ``any_kind`` for all."""
    annotation = model
    for part in key:
        if isinstance(part, int):  # `models_in` looks into lists
            value = value[part]
            continue
        inner = values_of(annotation)
        models = of_kind(list(models_in(annotation)), value)
        annotation = field_of(models, part) if inner is None else inner
        value = value.get(part) if isinstance(value, Mapping) else None
    models = list(models_in(annotation))
    return models if any_kind else of_kind(models, value)


def _all_keys(model: Any, around: Key = ()) -> list[Key]:
    keys: list[Key] = []
    for one in models_in(model):
        for name, field in one.model_fields.items():
            keys += [(*around, name), *_all_keys(field.annotation, (*around, name))]
    return keys


def _hint(model: type[BaseModel], key: Key, recipe: Any) -> str:
    fields = [one.model_fields.get(str(key[-1])) for one in sections(model, key[:-1], recipe)]
    description = next((field.description for field in fields if field is not None), None)
    return f" ({description})" if description else ""
