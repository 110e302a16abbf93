"""YAML that remembers where each key stands, so that an error can say so.

PyYAML parses; this walks its node tree. Unlike PyYAML it refuses a key given twice, and it reads ``1e-5`` as a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from leret.core.errors import ConfigError

Key = tuple[str | int, ...]
"""A path into nested mappings and lists: ``("policy", "urls", 0)``."""

_MAX_DEPTH = 50
"""Deeper than any recipe; an alias that contains itself ends here."""
_MAX_VALUES = 100_000
"""More than any recipe has: aliases of aliases are a billion in a few hundred bytes."""
_PLAIN = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the numbers of YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@dataclass
class Placed:
    """A YAML document's value, where its keys stand, and what is wrong with it.

    Attributes:
        value: the document; None where it could not be read.
        places: key to place (``file.yaml:12``).
        problems: keys given twice, keys that are no text.
    """

    value: Any
    places: dict[Key, str]
    problems: list[str] = field(default_factory=list)

    def at(self, key: Key) -> str:
        """How a message begins that names ``key`` next: ``file.yaml:12: ``, or ``--set `` where a flag gave it.

        Where the key is absent, the place is that of the nearest section around it.
        """
        while key and key not in self.places:
            key = key[:-1]
        place = self.places.get(key, "")
        return f"{place} " if place.startswith("-") else f"{place}: " if place else ""


def parse(text: str, source: str) -> Placed:
    """Read a YAML document.

    Args:
        text: the document.
        source: its name in messages.

    Raises:
        ConfigError: it is not YAML; with the line.
    """
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # a character that YAML does not have
        raise ConfigError(_syntax(error, source)) from error
    try:
        node = loader.get_single_node()
        if node is not None and _n_values(node, {}) > _MAX_VALUES:
            raise ConfigError(f"{source}: more than {_MAX_VALUES} values, aliases written out; write fewer")
        walk = _Walk(loader, source)
        value = None if node is None else walk.value(node, (), 0)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax(error, source)) from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply; {_MAX_DEPTH} levels are allowed") from error
    finally:
        loader.dispose()
    return Placed(value, walk.places, walk.problems)


def _n_values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node is, every alias written out; one that contains itself counts as nothing there."""
    if id(node) not in known:
        known[id(node)] = 0
        items = () if isinstance(node, yaml.ScalarNode) else node.value
        parts = (part for item in items for part in (item if isinstance(item, tuple) else (item,)))
        known[id(node)] = 1 + sum(_n_values(part, known) for part in parts)
    return known[id(node)]


def _syntax(error: yaml.YAMLError, source: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        return f"{source}: the character {error.character!r} is not allowed in YAML; save the file as plain UTF-8 text"
    what = str(getattr(error, "problem", None) or error)
    if "\\t" in what:
        what = "a tab indents the line; YAML wants spaces"
    place = f"{source}:{mark.line + 1}" if mark else source
    return f"{place}: not YAML: {what}"


class _Walk:
    """Turns nodes into values and notes places on the way."""

    def __init__(self, loader: _Loader, source: str) -> None:
        self.loader = loader
        self.source = source
        self.places: dict[Key, str] = {}
        self.problems: list[str] = []

    def value(self, node: yaml.Node, key: Key, depth: int) -> Any:
        """The value of ``node``, which stands at ``key``."""
        if depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply, or an alias of itself", problem_mark=node.start_mark)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
            raise yaml.MarkedYAMLError(problem=f"the tag {node.tag} means nothing here", problem_mark=node.start_mark)
        self.places.setdefault(key, self._place(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*key, index), depth + 1) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, key: Key, depth: int) -> dict[str, Any]:
        given = {item.value for item, _ in node.value}
        if "<<" in given:
            self.loader.flatten_mapping(node)  # merged keys come first, so that those of the mapping itself win
        found: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = self._name(name_node)
            here = (*key, name)
            if name in found and "<<" not in given:
                what = f"{dotted(here)}: given twice (first at {self.places[here]}); keep one"
                self.problems.append(f"{self._place(name_node)}: {what}")
            self.places[here] = self._place(name_node)
            found[name] = self.value(value_node, here, depth + 1)
        return found

    def _name(self, node: yaml.Node) -> str:
        name = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(name, str):
            shown = getattr(node, "value", name)
            self.problems.append(f"{self._place(node)}: the key {shown} must be text; put it in quotes")
        return str(name)

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self.loader.construct_object(node, deep=True)
        except (ValueError, OverflowError) as error:  # a date such as 2024-13-45
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from error

    def _place(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}"


def dotted(key: Key) -> str:
    """``("policy", "urls", 0)`` as ``policy.urls[0]``."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
