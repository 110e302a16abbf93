"""Turns pydantic errors into messages with the place, key and value, and advice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from leret.config.base import models_in
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
    for n, part in enumerate(location):
        inside = isinstance(value, Mapping) and part in value
        if inside or (isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)):
            value = value[part]
            key.append(part)
        elif detail["type"] == "missing" and n == len(location) - 1:
            key.append(part)
    if detail["type"].startswith("union_tag"):
        key.append(detail["ctx"]["discriminator"].strip("'"))
    return tuple(key)


def _fault(detail: Mapping[str, Any], key: Key, model: type[BaseModel], recipe: Any) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(key, model, recipe)
    if kind in {"missing", "union_tag_not_found"}:
        return f"missing; add it{_hint(model, key, recipe) if kind == 'missing' else ''}"
    if kind in {"literal_error", "union_tag_invalid"}:
        value = context.get("tag", value)
        allowed = re.findall(r"'([^']*)'|\b(\d+)\b", context.get("expected_tags") or context["expected"])
        names = [word or number for word, number in allowed]
        return f"{value!r} is not one of {', '.join(names)}{nearest(str(value), names)}"
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind](context)}, got {value!r}"
    if kind in {"model_type", "model_attributes_type"}:
        return f"must be a section with keys, got {value!r}; write the keys below, indented"
    expected = _KINDS.get(kind.split("_")[0])
    if expected and not any(word in kind for word in ("pattern", "too_")):
        return f"must be {expected}, got {value!r}"
    return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, got {value!r}"


def nearest(name: str, known: list[str]) -> str:
    """Return ``; did you mean recall?``, or an empty string if no known name is similar."""
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _unknown(key: Key, model: type[BaseModel], recipe: Any) -> str:
    around, name = key[:-1], str(key[-1])
    known = sorted({field for one in sections(model, around, recipe) for field in one.model_fields})
    numbered = [k for k in known if k[-1].isdigit() and name[-1:].isdigit() and k[:-1] == name[:-1]]
    near = numbered or get_close_matches(name, known, 1)
    others = (one for one in sections(model, around, recipe, any_kind=True) if name in one.model_fields)
    if kinds := [one.model_fields[tag].default for one in others if (tag := _tag(one)) in one.model_fields]:
        return f"unknown key for this kind (known for {', '.join(kinds)}); remove it"
    if near:
        return f"unknown key; did you mean {dotted((*around, near[0]))}?"
    if elsewhere := [k for k in _all_keys(model) if k[-1] == name]:
        return f"unknown key in this section; did you mean {dotted(elsewhere[0])}?"
    return f"unknown key; available: {', '.join(known)}"


def sections(model: Any, key: Key, value: Any, *, any_kind: bool = False) -> list[type[BaseModel]]:
    """Return the settings classes of the section at a key: for the kind in the recipe, or with ``any_kind`` for all."""
    models = list(models_in(model))
    for part in key:
        models = _of_kind(models, value)
        value = value.get(part) if isinstance(value, Mapping) else None if isinstance(part, str) else value[part]
        if isinstance(part, str):
            fields = [one.model_fields[part] for one in models if part in one.model_fields]
            models = [inner for field in fields for inner in models_in(field.annotation)]
    return models if any_kind else _of_kind(models, value)


def _of_kind(models: list[type[BaseModel]], value: Any) -> list[type[BaseModel]]:
    def fits(model: type[BaseModel]) -> bool:
        field = model.model_fields.get(_tag(model))
        if field is None or get_origin(field.annotation) is not Literal or not isinstance(value, Mapping):
            return True
        return value.get(_tag(model)) in get_args(field.annotation)

    return [model for model in models if fits(model)] or models


def _tag(model: type[BaseModel]) -> str:
    return getattr(model, "tag", "kind")


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
