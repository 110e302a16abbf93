"""Read and write YAML 1.2 as plain values, with the file and line of each key for error messages."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from leret.core.errors import ConfigError

Key = tuple[str | int, ...]
"""A path into nested mappings and lists: ``("policy", "urls", 0)``."""

_TEXT = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"  # the key `<<` takes the keys of another mapping

_MAX_DEPTH = 50  # limits an alias that contains itself
_MAX_VALUES = 100_000  # nested aliases can expand a few hundred bytes to a billion values


@dataclass
class Placed:
    """A document (None if empty), locations of its keys (``file.yaml:12``), and errors for keys that are not text."""

    value: Any
    locations: dict[Key, str]
    problems: list[str] = field(default_factory=list)

    def at(self, key: Key) -> str:
        """Return the location that a message about ``key`` begins with: ``file.yaml:12: `` or, for a flag, ``--set ``.

        If ``key`` is not in the file, the location is that of the nearest enclosing section.
        """
        while key and key not in self.locations:
            key = key[:-1]
        place = self.locations.get(key, "")
        if place.startswith("-"):
            return f"{place} "
        return f"{place}: " if place else ""

    def label(self, key: Key) -> str:
        """Return a key with its location; for the value of a command's own flag, the flag alone."""
        place = self.locations.get(key, "")
        if place.startswith("--") and place != "--set":
            return place
        return f"{self.at(key)}{dotted(key)}"


def parse(text: str, source: str) -> Placed:
    """Parse a document and record the locations of its keys; ``source`` is the file name in messages."""
    reader = YAML(typ="safe", pure=True)
    placed = Placed(None, {(): f"{source}:1"})
    try:
        document = reader.compose(text)
        if document is not None:
            _locate(document, (), source, placed)
            placed.value = reader.constructor.construct_document(document)
    except RecursionError as error:
        raise ConfigError(
            f"{source}: nested too deeply; use at most {_MAX_DEPTH} levels"
        ) from error
    except (YAMLError, ValueError) as error:  # ValueError: a date such as 2024-13-45
        raise ConfigError(_fault(error, source)) from error
    return placed


def _locate(node: Any, key: Key, source: str, placed: Placed) -> None:
    """Record the lines of a composed document's keys, and the keys that are not text."""
    if len(key) > _MAX_DEPTH or len(placed.locations) > _MAX_VALUES:
        limits = f"use at most {_MAX_DEPTH} levels and {_MAX_VALUES} values (aliases are expanded)"
        raise ConfigError(f"{placed.at(key)}nested too deeply or too long; {limits}")
    parts: list[tuple[Any, Any, Any]] = []
    if isinstance(node, SequenceNode):
        parts = [(i, item, item) for i, item in enumerate(node.value)]
    elif isinstance(node, MappingNode):
        parts = [(str(name.value), name, value) for name, value in node.value]
    for name, start, value in parts:
        part = (*key, name)
        placed.locations[part] = f"{source}:{start.start_mark.line + 1}"
        if isinstance(node, MappingNode) and start.tag not in {_TEXT, _MERGE}:
            placed.problems.append(
                f"{placed.at(part)}the key {name} must be text; put it in quotes"
            )
            start.tag = _TEXT  # else the missing text would be a second problem
        _locate(value, part, source, placed)


def load(text: str) -> Any:
    """Parse a document without recording locations."""
    return parse(text, "YAML").value


def dump(value: Any) -> str:
    """Format plain values as a YAML document; mappings keep their order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.width = 4096
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()


def dotted(key: Key) -> str:
    """Format ``("policy", "urls", 0)`` as ``policy.urls[0]``."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text


def _fault(error: Exception, source: str) -> str:
    if isinstance(error, ReaderError):
        return f"{source}: the character {error.character!r} is not allowed in YAML; save the file as plain UTF-8 text"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{source}:{mark.line + 1}" if mark else source
    problem = str(getattr(error, "problem", None) or error)
    if isinstance(error, DuplicateKeyError):
        name = re.search(r'duplicate key "(.*?)"', problem)
        return f"{place}: {name.group(1) if name else 'a key'}: set twice; keep one"
    if r"'\t'" in problem:
        problem = "a tab indents the line; use spaces"
    return f"{place}: invalid YAML: {problem}"
