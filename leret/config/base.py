"""The base classes of all sections of a recipe, and the marks on their keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    model_validator,
)
from pydantic.fields import FieldInfo

from leret.core.yaml import Key

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Settings(BaseModel):
    """A section that refuses unknown keys and is frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class KindSettings(Settings):
    """A section with kinds, each a class and a line of a table.

    A class without a default ``kind`` validates as the union of the kinds that derive from it.
    """

    tag: ClassVar[str] = "kind"  # the key that identifies the kind; a literal in each class
    default_kind: ClassVar[str | None] = None  # of a section without the key
    table: ClassVar[Mapping[str, Any]] = {}  # entries by kind, with their class as ``settings``; set by its module

    @classmethod
    def kinds(cls) -> tuple[type[Self], ...]:
        """Return the classes of the union that this class stands for."""
        if not cls.model_fields[cls.tag].is_required():
            return (cls,)
        if cls.table:
            return tuple(entry.settings for entry in cls.table.values() if issubclass(entry.settings, cls))
        kinds = (kind for subclass in cls.__subclasses__() for kind in subclass.kinds())
        return tuple({kind.model_fields[cls.tag].default: kind for kind in kinds}.values())

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, Mapping) or not cls.model_fields[cls.tag].is_required():
            return handler(values)
        default = {} if cls.default_kind is None else {cls.tag: cls.default_kind}
        kind: Self = _union(cls.kinds(), cls.tag).validate_python({**default, **values})
        return kind


@lru_cache
def _union(kinds: tuple[Any, ...], tag: str) -> TypeAdapter[Any]:
    union: Any = Annotated[Union[kinds], Field(discriminator=tag)]  # noqa: UP007  built from a tuple
    return TypeAdapter(union)


@dataclass(frozen=True)
class Free:
    """Marks a key or section that may change on resume, because it does not affect samples."""


@dataclass(frozen=True)
class RecipePath:
    """Marks a key that names a file or directory. `leret.config.load` says where a relative path is looked up."""

    noun: str  # of the file in messages
    advice: str = "correct the path"
    hub: bool = False  # the value may be a model on the Hugging Face hub (owner/name)
    names: tuple[str, ...] = ()  # values that are not paths (demo)
    may_be_missing: bool = False
    member: bool = False  # the path is followed by :Name, as in FILE.py:Class
    only: str = ""  # suffix of a path; a value with another suffix is a name


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every settings class in an annotation: a union, a list, a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, KindSettings):
        yield from annotation.kinds()
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from models_in(part)


def free_keys(recipe: Any) -> frozenset[str]:
    """Return the dotted keys of a settings class or union that do not affect samples in any of its kinds.

    A free section is listed without its keys. Items of a list have no index, and names of a mapping are ``*``.
    """
    free: set[str] = set()
    deciding: set[str] = set()

    def walk(annotation: Any, around: str) -> None:
        for model in models_in(annotation):
            for name, field in model.model_fields.items():
                key = f"{around}{name}"
                if mark_of(field, Free) is not None:
                    free.add(key)
                    continue
                if not list(models_in(field.annotation)):
                    deciding.add(key)
                walk(field.annotation, f"{key}.*." if get_origin(field.annotation) is dict else f"{key}.")

    walk(recipe, "")
    return frozenset(free - deciding)


def with_paths(settings: M, change: Callable[[Key, str, RecipePath], str], key: Key = ()) -> M:
    """Return a copy with ``change(key, path, mark)`` for each path, without the class after it (``FILE.py:Class``)."""

    def changed(value: Any, mark: RecipePath | None, key: Key) -> Any:
        if isinstance(value, BaseModel):
            return with_paths(value, change, key)
        if isinstance(value, str) and mark is not None:
            path, colon, member = value.rpartition(":") if mark.member else (value, "", "")
            if not path.endswith(mark.only):
                return value
            return f"{change(key, path, mark)}{colon}{member}"
        if isinstance(value, tuple):
            return tuple(changed(item, mark, (*key, i)) for i, item in enumerate(value))
        if isinstance(value, dict):
            return {name: changed(item, mark, (*key, name)) for name, item in value.items()}
        return value

    marks = _path_marks(type(settings))
    return settings.model_copy(
        update={name: changed(getattr(settings, name), mark, (*key, name)) for name, mark in marks.items()}
    )


@lru_cache
def _path_marks(model: type[BaseModel]) -> dict[str, RecipePath | None]:
    return {name: mark_of(field, RecipePath) for name, field in model.model_fields.items()}


def portable(settings: BaseModel, directory: Path) -> dict[str, Any]:
    """Return settings as JSON values for a file in ``directory``, with existing paths relative to it."""

    def relative(key: Key, path: str, mark: RecipePath) -> str:
        return os.path.relpath(path, directory) if Path(path).exists() and path not in mark.names else path

    return with_paths(settings, relative).model_dump(mode="json")


def resolve_paths(settings: M, directory: Path) -> M:
    """Return settings from a file in ``directory`` with absolute paths, except those that do not exist there."""

    def absolute(key: Key, path: str, mark: RecipePath) -> str:
        place = directory / path
        return path if path in mark.names or not (place.exists() or mark.may_be_missing) else str(place.resolve())

    return with_paths(settings, absolute)


def paths_in(settings: BaseModel) -> list[tuple[Key, str, RecipePath]]:
    """List all paths in a recipe or section, with their keys and marks."""
    paths: list[tuple[Key, str, RecipePath]] = []

    def note(key: Key, path: str, mark: RecipePath) -> str:
        paths.append((key, path, mark))
        return path

    with_paths(settings, note)
    return paths


def mark_of(field: FieldInfo, kind: type[T]) -> T | None:
    """Return the mark of a key, even on a part of its annotation (``Annotated[str, mark] | None``)."""

    def marks(annotation: Any) -> Iterator[Any]:
        yield from getattr(annotation, "__metadata__", ())
        for part in get_args(annotation):
            yield from marks(part)

    return next((mark for mark in (*field.metadata, *marks(field.annotation)) if isinstance(mark, kind)), None)


def _without_key(value: Any) -> Any:
    if "@" in str(value) or "?" in str(value):  # the message leaves out the value, which may hold a key
        raise ValueError("remove user, password and query; put the key in a variable (api_key_env, token_env)")
    return value


BaseUrl = Annotated[str, AfterValidator(_without_key)]
BaseUrls = Annotated[tuple[str, ...], AfterValidator(_without_key)]
