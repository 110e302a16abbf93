"""What pydantic found wrong with a recipe, in leret's words: place, key, value, mend."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from leret.core.yaml import Key, Placed, dotted

_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "tuple": "a list",
          "dict": "a mapping", "list": "a list"}  # fmt: skip


def describe(detail: Mapping[str, Any], model: type[BaseModel], placed: Placed) -> str:
    """One line for one fault.

    Args:
        detail: as in ``ValidationError.errors()``.
        model: that was validated.
        placed: the recipe.

    Returns:
        ``file.yaml:12: policy.top_p: must be at most 1, is 2``.
    """
    key = _real(detail["loc"], placed.value)
    where = placed.at(key)
    if detail["type"] == "value_error":  # of our own validators: they name their keys themselves
        message = str(detail["ctx"]["error"])
        return f"{where}{message}" if not key or str(key[0]) in message else f"{where}{dotted(key)}: {message}"
    if detail["type"] == "missing":
        name = _real(detail["loc"][:-1], placed.value)
        full = dotted((*name, detail["loc"][-1]))
        return f"{where}{full}: missing; add it{_hint(model, (*name, detail['loc'][-1]))}"
    return f"{where}{dotted(key)}: {_complaint(detail, key, model)}"


def _complaint(detail: Mapping[str, Any], key: Key, model: type[BaseModel]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(key, model)
    if kind == "literal_error":
        allowed = [option.strip("'") for option in context["expected"].replace(" or ", ", ").split(", ")]
        nearest = difflib.get_close_matches(str(value), allowed, 1)
        return f"{value!r} is not one of {', '.join(allowed)}" + (f"; did you mean {nearest[0]}?" if nearest else "")
    for sign, words in _BOUNDS.items():
        if kind == sign:
            return f"must be {words(context)}, is {value!r}"
    if kind in {"model_type", "model_attributes_type"}:
        return f"must be a section of keys, is {value!r}; indent its keys under it"
    wanted = _KINDS.get(kind.split("_")[0])
    if wanted:
        return f"must be {wanted}, is {value!r}"
    return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, is {value!r}"


_BOUNDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda c: f"greater than {c['gt']}",
    "greater_than_equal": lambda c: f"at least {c['ge']}",
    "less_than": lambda c: f"less than {c['lt']}",
    "less_than_equal": lambda c: f"at most {c['le']}",
}


def _unknown(key: Key, model: type[BaseModel]) -> str:
    section = _section(model, key[:-1])
    known = sorted(section.model_fields) if section else []
    name = str(key[-1])
    numbered = [k for k in known if k[-1].isdigit() and name[-1:].isdigit() and k[:-1] == name[:-1]]
    nearest = numbered or difflib.get_close_matches(name, known, 1)
    if nearest:
        return f"unknown key; did you mean {dotted((*key[:-1], nearest[0]))}?"
    elsewhere = [k for k in _all_keys(model) if k[-1] == key[-1]]
    if elsewhere:
        return f"unknown key here; did you mean {dotted(elsewhere[0])}?"
    return f"unknown key; known here: {', '.join(known)}"


def _section(model: type[BaseModel], key: Key) -> type[BaseModel] | None:
    """The model that stands at ``key``."""
    for part in key:
        field = model.model_fields.get(str(part))
        inner = None if field is None else _model_in(field.annotation)
        if inner is None:
            return None
        model = inner
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of ``Settings`` or ``Settings | None``."""
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _all_keys(model: type[BaseModel], key: Key = ()) -> list[Key]:
    found: list[Key] = []
    for name, field in model.model_fields.items():
        found.append((*key, name))
        inner = _model_in(field.annotation)
        found += _all_keys(inner, (*key, name)) if inner else []
    return found


def _hint(model: type[BaseModel], key: Key) -> str:
    section = _section(model, key[:-1])
    field = section.model_fields.get(str(key[-1])) if section else None
    options = get_args(field.annotation) if field else ()
    if options and all(isinstance(option, str) for option in options):
        return f" ({' | '.join(options)})"
    return f" ({field.description})" if field and field.description else ""


def _real(loc: Key, value: Any) -> Key:
    """``loc`` without what pydantic adds to it (the branch of a union), cut where the recipe ends."""
    key: list[str | int] = []
    for part in loc:
        listed = isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value)
        if not listed and not (isinstance(value, Mapping) and part in value):
            break
        value = value[part]
        key.append(part)
    return tuple(key)
