"""What every section of a recipe shares: the settings class, and marks on keys with the code that reads them."""

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
    """Unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class KindSettings(Settings):
    """A section with kinds, each a class and a line of a table.

    A class whose ``kind`` has no default stands for the kinds that derive from it: it validates as their union.
    """

    tag: ClassVar[str] = "kind"
    """The key that tells the kinds apart; its type in each of them is a literal."""
    default_kind: ClassVar[str | None] = None
    """Of a section that names none."""
    table: ClassVar[Mapping[str, Any]] = {}
    """From kinds to entries with their class, ``settings``; the table's module puts it here."""

    @classmethod
    def kinds(cls) -> tuple[type[Self], ...]:
        """The classes that may stand where this one does."""
        if not cls.model_fields[cls.tag].is_required():
            return (cls,)
        if cls.table:
            return tuple(entry.settings for entry in cls.table.values() if issubclass(entry.settings, cls))
        found = (kind for below in cls.__subclasses__() for kind in below.kinds())
        return tuple({kind.model_fields[cls.tag].default: kind for kind in found}.values())

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
    union: Any = Annotated[Union[kinds], Field(discriminator=tag)]  # noqa: UP007  made of a tuple
    return TypeAdapter(union)


@dataclass(frozen=True)
class Free:
    """Marks a key, or a section, that may change when a run goes on: it decides no sample. ``Annotated[T, Free()]``."""


@dataclass(frozen=True)
class RecipePath:
    """Marks a key that names a file or directory; a relative one is looked for as `leret.config.load` says."""

    what: str  # is expected there, in a message
    mend: str = "correct the path"
    hub: bool = False  # the value may also be the name of a model of the Hugging Face hub (owner/name)
    names: tuple[str, ...] = ()  # values that are no paths (demo)
    may_be_missing: bool = False  # it is made later
    member: bool = False  # a :Name follows the path, as in FILE.py:Class
    only: str = ""  # a value whose path ends otherwise is a name, and no path


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every settings class in an annotation: of a union, a list, a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, KindSettings):
        yield from annotation.kinds()
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from models_in(part)


def free_keys(recipe: Any) -> frozenset[str]:
    """Dotted keys that decide no sample, of a settings class or a union of them.

    A section that is free as a whole stands alone, its keys do not. Items of a list have no index, names of a mapping
    are ``*``. A key that several kinds have is free where it is in all of them.
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
    """A copy whose paths, wherever `RecipePath` marks one, are what ``change`` makes of key, path and mark.

    ``key`` is that of ``settings`` in the recipe. A path comes without the class that may follow it.
    """

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
    """Settings as JSON values for a file in ``directory``: paths that exist are written relative to it."""

    def relative(key: Key, path: str, mark: RecipePath) -> str:
        return os.path.relpath(path, directory) if Path(path).exists() and path not in mark.names else path

    return with_paths(settings, relative).model_dump(mode="json")


def resolve_paths(settings: M, directory: Path) -> M:
    """Settings from a file in ``directory``, with paths that can be opened from here."""

    def found(key: Key, path: str, mark: RecipePath) -> str:
        there = (directory / path).exists() and path not in mark.names
        return str((directory / path).resolve()) if there else path

    return with_paths(settings, found)


def paths_in(settings: BaseModel) -> list[tuple[Key, str, RecipePath]]:
    """Every path that a recipe or a section names, with its key and mark."""
    found: list[tuple[Key, str, RecipePath]] = []

    def note(key: Key, path: str, mark: RecipePath) -> str:
        found.append((key, path, mark))
        return path

    with_paths(settings, note)
    return found


def mark_of(field: FieldInfo, kind: type[T]) -> T | None:
    """The mark of a key, also where it stands on a part of the annotation (``Annotated[str, mark] | None``)."""

    def marks(annotation: Any) -> Iterator[Any]:
        yield from getattr(annotation, "__metadata__", ())
        for part in get_args(annotation):
            yield from marks(part)

    return next((mark for mark in (*field.metadata, *marks(field.annotation)) if isinstance(mark, kind)), None)


def _without_key(value: Any) -> Any:
    if "@" in str(value) or "?" in str(value):  # not repeated, since it may hold a key
        raise ValueError(
            "a base URL holds no user, password or query; put the key in a variable (api_key_env, token_env)"
        )
    return value


BaseUrl = Annotated[str, AfterValidator(_without_key)]
BaseUrls = Annotated[tuple[str, ...], AfterValidator(_without_key)]
