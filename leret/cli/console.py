"""What a command writes: results on standard output; progress and errors on standard error."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["complain", "done", "facts", "plain", "say", "table", "warn_of_demo"]


def say(text: str = "") -> None:
    """A line on standard output, as it is: no markup, no wrapping, no colour."""
    _console(stderr=False).print(plain(text), soft_wrap=True)


def complain(text: str, label: str = "error: ") -> None:
    """A message on standard error."""
    style = "red" if label else None
    _console(stderr=True).print(f"{label}{plain(text)}", soft_wrap=True, style=style)


def done(text: str) -> None:
    """What a command achieved."""
    _console(stderr=False).print(plain(text), soft_wrap=True, style="bold")


def warn_of_demo(kind: str, model: str) -> None:
    """Warn where the shipped policy, in this process or served, meets data that it knows no word of."""
    if kind != "world" and re.fullmatch("demo(-[0-9a-f]{8})?", model):
        complain(
            "policy.model demo knows the words of leret's generated world alone, and finds next to nothing in other "
            "data; `leret init` writes a recipe with another policy",
            label="warning: ",
        )


def facts(values: Any) -> None:
    """A report or a plan: one line a field; None, empty and untrue ones left out.

    Args:
        values: a dataclass, or a mapping.
    """
    pairs = [(name, _shown(value)) for name, value in _items(values) if not _empty(value)]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, shown in pairs:
        say(f"  {name:<{width}}  {shown}")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """A table: the first column on the left, figures on the right; plain text where nobody watches."""
    from rich import box
    from rich.table import Table

    shown = Table(title=plain(title or "") or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        shown.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*map(plain, row))
    console = _console(stderr=False)
    if not console.is_terminal:
        console.width = 1000  # a file has no edge to wrap at
    console.print(shown)


def _empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (tuple, list, Mapping)) and not value)


def _items(values: Any) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        found = list(values.items())
    else:
        found = [(field.name, getattr(values, field.name)) for field in dataclasses.fields(values)]
    return [(str(name).replace("_", " "), value) for name, value in found]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(item) for item in value)
    return str(value)


def plain(text: str) -> str:
    """Text for a terminal: no character is a command or turns its direction; half a surrogate pair becomes a ?."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() or char in "\n\t" else " " for char in text)


def _console(*, stderr: bool) -> Any:
    """Made anew each time: tests and pipes change what the standard streams are. Text is neither markup nor emoji."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
