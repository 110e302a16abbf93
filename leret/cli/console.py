"""What commands share: arguments and flags; results on standard output, progress and errors on standard error."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer

from leret.core.errors import LeretError
from leret.core.progress import Progress

_JSON: ContextVar[bool] = ContextVar("leret_json", default=False)
_NAME, _HEAD = 16, 8
"""Characters that a table's first column always has; those that a head has before it is folded."""
_PART, _BAR = 24, 12
"""Columns of the name of a part of a stage, at most, and of its bar."""
_WORDS = {"no_spread": "states without spread", "histogram": "rewards in tenths of their range",
          "waiting": "left by an outage"}  # fmt: skip


def as_json(wanted: bool) -> bool:
    """``--json``: `facts` and `table` print their values as a JSON object, `say` and `done` nothing."""
    _JSON.set(wanted)
    return wanted


def _set(example: str) -> Any:
    return typer.Option("--set", metavar="KEY=VALUE", help=f"Override a key: {example}. Repeatable.")


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
RunOption = Annotated[Path, typer.Option("--run", metavar="DIR", help="The run directory.")]
Overrides = Annotated[list[str] | None, _set("sampling.samples=2")]
TrainingOverrides = Annotated[list[str] | None, _set("learning_rate=1e-6")]
DataOverrides = Annotated[list[str] | None, _set("data.split=dev")]
RetrieverOverrides = Annotated[list[str] | None, _set("store=hnsw")]
EvalOverrides = Annotated[list[str] | None, _set("limit=100")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what it costs; do nothing.")]
AsJson = Annotated[bool, typer.Option("--json", callback=as_json, help="Print one JSON object alone.")]
SkipInvalid = Annotated[bool, typer.Option("--skip-invalid", help="Leave out bad lines of the data, and count them.")]
FormatOption = Annotated[str | None, typer.Option("--format", help="jsonl, beir, hotpotqa, hover, musique or 2wiki.")]
Host = Annotated[str, typer.Option(help="Where to listen; other machines reach it only if you say so.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
IndexOrUrl = Annotated[str, typer.Argument(metavar="INDEX", help="An index directory, or the URL of a server.")]
TokenEnv = Annotated[str | None, typer.Option("--token-env", metavar="VAR", help="Variable with the server's token.")]


def say(text: str = "", style: str | None = None) -> None:
    """A line on standard output, as it is: no markup, no wrapping, no colour."""
    if not _JSON.get():
        _console(stderr=False).print(plain(text), soft_wrap=True, style=style)


def complain(text: str, label: str = "error: ") -> None:
    """A message on standard error."""
    style = {"error: ": "red", "warning: ": "yellow"}.get(label)
    _console(stderr=True).print(f"{label}{plain(text)}", soft_wrap=True, style=style)


def done(text: str) -> None:
    """What a command achieved."""
    say(text, style="bold")


def warn_of_demo(kind: str, model: str) -> None:
    """Warn where the shipped policy, in this process or served, meets data that it knows no word of."""
    if kind != "world" and re.fullmatch("demo(-[0-9a-f]{8})?", model):
        told = "finds next to nothing in other data; `leret init` writes a recipe with another policy"
        complain(f"policy.model demo knows the words of leret's generated world alone, and {told}", "warning: ")


def known_names() -> Callable[[Any], Iterator[tuple[tuple[str, ...], str]]]:
    """What the tables of readers and rewards lack of a sampling recipe: a check for `leret.config.load`.

    Makes the kinds of retrievers and policies known, too.
    """
    import leret.policies.load
    import leret.retrieval.load  # noqa: F401
    from leret.datasets.formats import reader_of
    from leret.rewards import reward

    def check(recipe: Any) -> Iterator[tuple[tuple[str, ...], str]]:
        for section, key, find in (("data", "kind", reader_of), ("sampling", "reward", reward)):
            try:
                if hasattr(recipe, section):
                    find(getattr(getattr(recipe, section), key))
            except LeretError as error:
                yield (f"{section}.{key}",), str(error)

    return check


def facts(values: Any, shown: Mapping[str, Any] | None = None) -> None:
    """A report or a plan, one line a field: of ``shown`` where that is given; its ``notes`` go to standard error.

    None, empty and untrue values are left out. ``values`` is a dataclass or a mapping.
    """
    for note in getattr(values, "notes", ()):
        complain(note, "note: ")
    if _JSON.get():
        print(json.dumps(_fields(values), default=_plain))
        return
    items = _fields(values if shown is None else shown).items()
    pairs = [(_WORDS.get(n, n).replace("_", " "), v) for n, v in items if not _empty(v) and n != "notes"]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        say(f"  {name:<{width}}  {_shown(value)}")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, values: Any = None) -> None:
    """A table whose figures are never cut: a narrow terminal folds the first column; ``--json`` prints ``values``."""
    from rich import box
    from rich.table import Table

    if _JSON.get():
        if values is not None:
            facts(values)
        return
    shown = Table(title=plain(title or "") or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    shown.padding = (0, 1, 0, 0)
    lines = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, (*name.split(), *(row[i] for row in lines)))) for i, name in enumerate(columns)]
    widths = [max(width, min(len(name), _HEAD)) for name, width in zip(columns, widths, strict=True)]
    for i, (name, width) in enumerate(zip(columns, widths, strict=True)):
        head = textwrap.fill(name, width, break_on_hyphens=False)
        shown.add_column(head, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for row in lines:
        shown.add_row(*row)
    draw(shown, least=min(widths[0], _NAME) + sum(widths[1:]) + 2 * len(widths))


def draw(shown: Any, least: int = 0) -> None:
    """Print one of Rich's tables, ``least`` characters wide or more; a file has no edge, and gets no padding."""
    console = _console(stderr=False)
    console.width = max(console.width if console.is_terminal else 1000, least)
    with console.capture() as captured:
        console.print(shown)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@contextmanager
def shown() -> Iterator[Progress]:
    """The progress of a stage: a live bar where somebody watches, plain lines in a file or a pipe."""
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    what = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=_PART))
    figures = TextColumn("{task.fields[figures]}", markup=False, style="dim", table_column=Column(no_wrap=True))
    # The stream of now: a console with stderr=True would look sys.stderr up at every write, find what redirects it
    # while a library is muted, and write to itself for ever.
    console = Console(file=sys.stderr)
    with RichProgress(what, BarColumn(bar_width=_BAR), figures, console=console, refresh_per_second=5) as bars:
        yield _Bars(bars)


class ProgressLines:
    """Plain lines on standard error: one every ``every_s`` seconds, and one at the end of each part."""

    def __init__(self, every_s: float = 5.0) -> None:
        self.every_s = every_s
        self.part = ""

    def start(self, stage: str, total: int | None) -> None:
        self.finish()
        self.part, self.total, self.done = stage, total, 0
        self.facts: dict[str, float | int | str] = {}
        self.began = self.written = time.monotonic()

    def advance(self, n: int = 1, **facts: float | int | str) -> None:
        if self.part:
            self.done += n
            self.facts.update(facts)
            self.show()

    def finish(self) -> None:
        if self.part:
            self.show(ended=True)
        self.part = ""

    def show(self, *, ended: bool = False) -> None:
        """Write a line, if it is time."""
        if ended or (time.monotonic() - self.written >= self.every_s and self.done != self.total):
            self.written = time.monotonic()
            print(f"{self.part}: {self.figures(ended=ended)}", file=sys.stderr, flush=True)

    def figures(self, *, ended: bool, width: int | None = None) -> str:
        """``12/60, 3.1/s, 0:15 left, mean reward 0.412``; the time it took once it has ended; cut to whole figures."""
        seconds = time.monotonic() - self.began
        rate = self.done / seconds if seconds > 0 else 0.0
        parts = []
        if self.done or self.total is not None:
            parts.append(f"{self.done:,}" + (f"/{self.total:,}" if self.total is not None else ""))
        if self.done:
            parts.append(f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s")
        if ended:
            parts.append(f"{seconds:.1f} s")
        elif self.total and rate:
            minutes, rest = divmod(round(max(0, self.total - self.done) / rate), 60)
            clock = f"{minutes // 60}:{minutes % 60:02d}" if minutes >= 60 else str(minutes)
            parts.append(f"{clock}:{rest:02d} left")
        for name, value in self.facts.items():
            figure = f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            parts.append(f"{name.replace('_', ' ')} {figure}")
        while width is not None and len(parts) > 1 and len(", ".join(parts)) > width:
            parts.pop()
        return plain(", ".join(parts))


class _Bars(ProgressLines):
    """A live display on a terminal, one bar a part; a bar is full where nobody knew how long it would be."""

    def __init__(self, bars: Any) -> None:
        super().__init__()
        self.bars = bars

    def start(self, stage: str, total: int | None) -> None:
        super().start(stage, total)
        self.task = self.bars.add_task(stage, total=total, figures="")

    def show(self, *, ended: bool = False) -> None:
        figures = self.figures(ended=ended, width=self.bars.console.width - _PART - _BAR - 2)
        total = self.total if self.total is not None or not ended else max(1, self.done)
        done = total if ended and self.total is None else self.done
        self.bars.update(self.task, total=total, completed=done, figures=figures)
        if ended:
            self.bars.stop_task(self.task)


def _empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (tuple, list, Mapping)) and not value)


def _fields(values: Any) -> dict[str, Any]:
    if isinstance(values, Mapping):
        return dict(values)
    return {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}


def _plain(value: Any) -> Any:
    return _fields(value) if dataclasses.is_dataclass(value) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        none = "not scored (only candidates are)"
        return ", ".join(f"{name} {none if item is None else _shown(item)}" for name, item in value.items())
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
