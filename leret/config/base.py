"""Base classes of recipe sections, and markers for their keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticKnownError

from leret.core.classes import is_path, load_named
from leret.core.errors import ConfigError
from leret.core.yaml import Key

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

TAGS = ("kind", "algorithm")
"""Keys that select the kind of a section."""


class Settings(BaseModel):
    """A frozen recipe section that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    removed: ClassVar[Mapping[str, Any]] = {}
    """Removed keys with their defaults, which earlier versions wrote in runs; only a default is dropped."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, section: Any) -> Any:
        if not isinstance(section, Mapping):
            return section
        current = dict(section)
        for name, default in cls.removed.items():
            if name in current and current[name] == default:
                del current[name]
        return current


class KindSettings(Settings):
    """A section with several kinds, each a subclass that fixes ``kind``. ``table`` lists them.

    A class that does not fix ``kind`` validates to an instance of the subclass that the ``kind`` key selects: the short
    name of a kind, or the path of a user's kind (``FILE.py:NAME`` or ``package.module:NAME``). The object at the path
    is what a table holds: it has the settings class in ``settings``.
    """

    # key that selects the kind; each subclass annotates it with a Literal
    tag: ClassVar[str] = "kind"
    default_kind: ClassVar[str | None] = None  # kind of a section without this key
    # By kind: an object with the settings class in ``settings``; set by the table's module.
    table: ClassVar[Mapping[str, Any]] = {}
    # Paths of the kinds in leret/extras/ by short name.
    shelf: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def kinds(cls) -> tuple[type[Self], ...]:
        """Return the concrete classes of this section, one per kind, without kinds named by path."""
        if not cls.model_fields[cls.tag].is_required():
            return (cls,)
        classes: dict[type[Any], None] = {}
        if cls.table:
            classes |= dict.fromkeys(kind.settings for kind in cls.table.values())
        else:
            for subclass in cls.__subclasses__():
                classes |= dict.fromkeys(subclass.kinds())
        for path in cls.shelf.values():
            classes[resolve_name(path).settings] = None
        return tuple(settings for settings in classes if issubclass(settings, cls))

    @classmethod
    def find(cls, name: str) -> Any:
        """Return the kind with a short name or at a path; None for an unknown name, ConfigError for a wrong path."""
        if name in cls.shelf:
            return resolve_name(cls.shelf[name])
        if not is_path(name):
            return cls.table.get(name)
        return load_named(name, cls.tag, partial(is_kind, family=cls))

    @classmethod
    def _settings(cls, name: str) -> type[Self]:
        candidate = cls.find(name)
        if is_kind(candidate, cls):
            settings: type[Self] = candidate.settings
            return settings  # without importing the shelf for leret's own kinds
        for kind in cls.kinds():
            if name in names_of(kind):
                return kind
        available: list[str] = []
        for kind in cls.kinds():
            available += map(repr, names_of(kind))
        context = {
            "discriminator": f"'{cls.tag}'",
            "tag": name,
            "expected_tags": ", ".join(available),
        }
        raise PydanticKnownError("union_tag_invalid", context)

    @classmethod
    def version(cls, values: Mapping[str, Any]) -> type[Self]:
        """Return the class for values of this kind, if another key than the tag selects one too."""
        return cls

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, Mapping) or not cls.model_fields[cls.tag].is_required():
            return handler(values)
        name = values.get(cls.tag, cls.default_kind)
        if not isinstance(name, str):
            raise PydanticKnownError("union_tag_not_found", {"discriminator": f"'{cls.tag}'"})
        name = {path: short for short, path in cls.shelf.items()}.get(name, name)
        try:
            settings = cls._settings(name).version(values)
        except ConfigError as error:
            context = {"discriminator": f"'{cls.tag}'", "reason": str(error)}
            raise PydanticCustomError("union_tag_path", "{reason}", context) from error
        if settings is cls:
            return handler(values)
        return settings.model_validate({**values, cls.tag: name})


def is_kind(value: Any, family: type[BaseModel] = KindSettings) -> bool:
    """Return True for an object with the settings class of a kind of this family."""
    settings = getattr(value, "settings", None)
    return isinstance(settings, type) and issubclass(settings, family)


def names_of(settings: type[BaseModel]) -> tuple[Any, ...]:
    """Return the kinds that a settings class is for; empty if it does not fix its kind."""
    field = settings.model_fields.get(getattr(settings, "tag", "kind"))
    if field is None or get_origin(field.annotation) is not Literal:
        return ()
    return get_args(field.annotation)


@dataclass(frozen=True)
class Free:
    """Marks a key or section that may change on resume because it does not affect samples."""


@dataclass(frozen=True)
class RecipePath:
    """Marks a key whose value is a path. `leret.config.load` documents where relative paths are looked up."""

    noun: str  # name of the file in messages, as in "question file"
    advice: str = "fix the path"
    hub: bool = False  # also accepts a model on the Hugging Face hub (owner/name)
    names: tuple[str, ...] = ()  # values that are names, not paths (demo)
    may_be_missing: bool = False
    member: bool = False  # the value is PATH:Name, as in FILE.py:Class
    only: str = ""  # suffix of paths; a value with another suffix is a name, not a path


@dataclass(frozen=True)
class KeyVariable:
    """Marks a key that names an environment variable with a secret, which is sent to the URLs in another key."""

    addresses: str  # key with the URLs that receive the secret


def default_variable(variable: str, urls: str | Sequence[str], *services: str) -> str | None:
    """Return the default of a `KeyVariable`: ``variable``, or None if a URL is not one of the secret's services.

    >>> default_variable("TOGETHER_API_KEY", ["http://127.0.0.1:8000"], "https://api.together.ai/v1")
    """
    addresses = [urls] if isinstance(urls, str) else urls
    if all(url.rstrip("/") in services for url in addresses):
        return variable
    return None


def sections_in(value: Any) -> Iterator[BaseModel]:
    """Yield all sections in settings, a list or a mapping, each before the sections inside it."""
    for section in _sections(value):
        yield section
        for name in type(section).model_fields:
            yield from sections_in(getattr(section, name))


def secrets_in(value: Any) -> Iterator[tuple[str, str]]:
    """Yield each variable with a secret in validated settings and their sections, and the URLs that receive it."""
    for section in sections_in(value):
        for name, field in type(section).model_fields.items():
            mark = mark_of(field, KeyVariable)
            variable = getattr(section, name)
            if mark is not None and variable is not None:
                urls = getattr(section, mark.addresses)
                yield variable, urls if isinstance(urls, str) else ", ".join(urls)


def kind_paths(value: Any) -> list[str]:
    """Return the paths of the user's kinds in settings and their sections."""
    kinds = [getattr(section, "kind", "") for section in sections_in(value)]
    return [kind for kind in kinds if is_path(kind)]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every settings class in an annotation, also inside a union, list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, KindSettings):
        yield from annotation.kinds()
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from models_in(part)


def free_keys(recipe: Any) -> frozenset[str]:
    """Return the dotted keys of a recipe (or its class) marked `Free`. In a union, every class must mark the key.

    A marked section is listed without its keys. Keys in list items have no index; ``*`` is any name in a mapping.
    """
    free: set[str] = set()
    deciding: set[str] = set()

    def walk(annotation: Any, values: Sequence[Any], around: str) -> None:
        models: list[type[BaseModel]] = [*models_in(annotation), *map(type, values)]
        for model in dict.fromkeys(models):
            for name, field in model.model_fields.items():
                key = f"{around}{name}"
                if mark_of(field, Free) is not None:
                    free.add(key)
                    continue
                if not list(models_in(field.annotation)):
                    deciding.add(key)
                inner: list[Any] = []
                for value in values:
                    inner += _sections(getattr(value, name, None))
                walk(
                    field.annotation,
                    inner,
                    f"{key}.*." if get_origin(field.annotation) is dict else f"{key}.",
                )

    if isinstance(recipe, BaseModel):
        walk(type(recipe), [recipe], "")
    else:
        walk(recipe, (), "")
    return frozenset(free - deciding)


def _sections(value: Any) -> list[BaseModel]:
    """Return the sections in a value: itself, or the items of a list or mapping."""
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(items, list | tuple):
        items = [items]
    return [item for item in items if isinstance(item, BaseModel)]


def locate_kinds(value: Any, folders: Sequence[Path]) -> Any:
    """Return recipe values in which the FILE.py of each kind is absolute, if it exists in one of the folders."""
    if isinstance(value, list):
        return [locate_kinds(item, folders) for item in value]
    if not isinstance(value, dict):
        return value
    located = {name: locate_kinds(item, folders) for name, item in value.items()}
    for tag in (*TAGS, "engine"):
        path, _, name = str(value.get(tag)).rpartition(":")
        candidates = [folder / Path(path).expanduser() for folder in folders]
        files = [file for file in candidates if path.endswith(".py") and file.is_file()]
        if files:
            located[tag] = f"{files[0].resolve()}:{name}"
    return located


def with_paths(settings: M, change: Callable[[Key, str, RecipePath], str], key: Key = ()) -> M:
    """Return a copy with each path, including FILE.py in ``FILE.py:Class``, replaced by ``change(key, path, mark)``."""

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
            return type(value)(
                {name: changed(item, mark, (*key, name)) for name, item in value.items()}
            )
        return value

    marks = _path_marks(type(settings))
    return settings.model_copy(
        update={
            name: changed(getattr(settings, name), mark, (*key, name))
            for name, mark in marks.items()
        }
    )


@lru_cache
def _path_marks(model: type[BaseModel]) -> dict[str, RecipePath | None]:
    return {name: mark_of(field, RecipePath) for name, field in model.model_fields.items()}


def portable(settings: BaseModel, directory: Path) -> dict[str, Any]:
    """Return settings as JSON values, with existing paths relative to ``directory``."""

    def relative(key: Key, path: str, mark: RecipePath) -> str:
        if path in mark.names or not Path(path).exists():
            return path
        return os.path.relpath(path, directory)

    return with_paths(settings, relative).model_dump(mode="json")


def resolve_paths(settings: M, directory: Path) -> M:
    """Return settings with paths relative to ``directory`` made absolute. Paths that do not exist stay unchanged."""

    def absolute(key: Key, path: str, mark: RecipePath) -> str:
        whole = directory / path
        if path not in mark.names and (whole.exists() or mark.may_be_missing):
            return str(whole.resolve())
        return path

    return with_paths(settings, absolute)


def paths_in(settings: BaseModel) -> list[tuple[Key, str, RecipePath]]:
    """List all paths in a recipe or section as (key, path, mark)."""
    paths: list[tuple[Key, str, RecipePath]] = []

    def note(key: Key, path: str, mark: RecipePath) -> str:
        paths.append((key, path, mark))
        return path

    with_paths(settings, note)
    return paths


KindName = Annotated[
    str, RecipePath("file of the kind", "name it as FILE.py:NAME", member=True, only=".py")
]
"""The ``kind`` key of a family: a short name, or the path of a user's kind."""


def mark_of(field: FieldInfo, kind: type[T]) -> T | None:
    """Return a field's mark, which may be nested in its annotation (``Annotated[str, mark] | None``)."""

    def marks(annotation: Any) -> Iterator[Any]:
        yield from getattr(annotation, "__metadata__", ())
        for part in get_args(annotation):
            yield from marks(part)

    return next(
        (mark for mark in (*field.metadata, *marks(field.annotation)) if isinstance(mark, kind)),
        None,
    )


def _without_key(value: Any) -> Any:
    # the message omits the value, which may contain a key
    if "@" in str(value) or "?" in str(value):
        raise ValueError(
            "must not contain user, password or query; set api_key_env or token_env instead"
        )
    return value


BaseUrl = Annotated[str, AfterValidator(_without_key)]
BaseUrls = Annotated[tuple[str, ...], AfterValidator(_without_key)]
