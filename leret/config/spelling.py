"""Corrects misspelled keys and kinds of a recipe before it is validated, so that each typo is one problem."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from leret.config.base import models_in
from leret.core.yaml import Key, Placed, dotted


def corrected(placed: Placed, model: Any, more: Collection[str] = ()) -> tuple[Placed, list[str]]:
    """Return a recipe with misspelled keys and kinds corrected, and a message for each of them.

    ``more`` are top-level keys besides those of ``model``. A key that is too different from all keys stays unchanged.
    """
    speller = _Speller(placed, more)
    value = speller.correct(model, placed.value, (), ())
    return Placed(value, speller.places, placed.problems), speller.problems


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to ``name``, without regard to case, or None if none is similar.

    >>> closest("MAP", ["recall", "ap"])
    'ap'
    """
    by_lower = {candidate.lower(): candidate for candidate in names}
    lower = name.lower()
    for candidate, original in by_lower.items():  # k2 is a misspelled k1, not a misspelled k
        ends_in_digits = candidate[-1:].isdigit() and lower[-1:].isdigit()
        if ends_in_digits and candidate[:-1] == lower[:-1]:
            return original
    near = get_close_matches(lower, by_lower, 1)
    return by_lower[near[0]] if near else None


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean recall?``, or an empty string if no name is similar."""
    near = closest(name, names)
    return f"; did you mean {near}?" if near else ""


def unknown_name(value: object, names: Iterable[str]) -> str:
    """Say that a value is none of the names, with the most similar name."""
    listed = list(names)
    return f"{value!r} is not one of {', '.join(listed)}{nearest(str(value), listed)}"


def tag_of(model: type[BaseModel]) -> str:
    """Return the key that selects the kind of a section."""
    return getattr(model, "tag", "kind")


def kinds_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the kinds of a settings class; empty if it accepts any kind, or has none."""
    field = model.model_fields.get(tag_of(model))
    if field is None or get_origin(field.annotation) is not Literal:
        return ()
    return tuple(map(str, get_args(field.annotation)))


def of_kind(models: list[type[BaseModel]], value: Any) -> list[type[BaseModel]]:
    """Return the settings classes for the kind of a section, or all if none is for this kind."""
    if not models or not isinstance(value, Mapping):
        return models
    kind = value.get(tag_of(models[0]), getattr(models[0], "default_kind", None))
    exact = [model for model in models if kind in kinds_of(model)]
    return exact or [model for model in models if not kinds_of(model)] or models


class _Speller:
    def __init__(self, placed: Placed, more: Collection[str]) -> None:
        self.placed, self.more = placed, more
        self.places = dict(placed.places)
        self.problems: list[str] = []

    def correct(self, annotation: Any, value: Any, written: Key, key: Key) -> Any:
        """Return a value of the annotated type with corrected keys. ``written`` is its key in the recipe."""
        if written in self.placed.places:
            self.places[key] = self.placed.places[written]
        if isinstance(value, list):
            return [self.correct(annotation, item, (*written, i), (*key, i)) for i, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        names: Mapping[str, str | None] = {name: name for name in value}
        inner = values_of(annotation)
        models = list(models_in(annotation)) if inner is None else []
        if models:
            names = self._names(models, value, written, key)
            value = self._with_kind(models, value, names, written)
            models = of_kind(models, {names[name]: item for name, item in value.items()})
        result: dict[str, Any] = {}
        for name, right in sorted(names.items(), key=lambda pair: pair[0] == pair[1]):  # a right spelling wins
            if right is None:
                continue
            child = field_of(models, right) if inner is None else inner
            item = self.correct(child, value[name], (*written, name), (*key, right))
            if isinstance(item, dict) and isinstance(result.get(right), dict):
                item = result[right] | item
            result[right] = item
        return result

    def _names(self, models: list[type[BaseModel]], value: Any, written: Key, key: Key) -> dict[str, str | None]:
        """Return the right names of a section's keys; None for a misspelling of a key in ``more``."""
        every = fields_of(models)
        tag = tag_of(models[0])
        tags = [tag] if tag in value else [n for n in value if n not in every and closest(n, every) == tag]
        kind = {tag: value[tags[0]]} if tags else {}
        models = of_kind(models, kind)
        known = [*fields_of(models), *(self.more if not key else ())]
        is_open = any(model.model_config.get("extra") == "allow" for model in models)
        names: dict[str, str | None] = {}
        for name in value:
            near = None if name in every or is_open or name in known else closest(name, known)
            if near is None:
                names[name] = name
                continue
            self._report((*written, name), f"unknown key; did you mean {dotted((*key, near))}?")
            names[name] = None if not key and near in self.more else near
        return names

    def _with_kind(
        self, models: list[type[BaseModel]], value: Any, names: Mapping[str, str | None], written: Key
    ) -> Mapping[str, Any]:
        """Correct the kind of a section, if it is similar to a kind and the section accepts only known kinds."""
        kinds = [kind for model in models for kind in kinds_of(model)]
        tag = next((name for name, right in names.items() if right == tag_of(models[0])), None)
        if tag is None or not kinds or not all(kinds_of(model) for model in models):
            return dict(value)
        near = None if value[tag] in kinds else closest(str(value[tag]), kinds)
        if near is None:
            return dict(value)
        self._report((*written, tag), unknown_name(value[tag], kinds))
        return {**value, tag: near}

    def _report(self, key: Key, message: str) -> None:
        self.problems.append(f"{self.placed.at(key)}{dotted(key)}: {message}")


def fields_of(models: Iterable[type[BaseModel]]) -> list[str]:
    """Return the names of all fields of settings classes."""
    return sorted({name for model in models for name in model.model_fields})


def field_of(models: Iterable[type[BaseModel]], name: str) -> Any:
    """Return the annotation of a field, or None. A field has the same type in all kinds that have it."""
    return next((model.model_fields[name].annotation for model in models if name in model.model_fields), None)


def values_of(annotation: Any) -> Any:
    """Return the type of the values of a mapping (``X`` for ``dict[str, X] | None``), or None for other types."""
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    return next((inner for part in get_args(annotation) if (inner := values_of(part)) is not None), None)
