"""Progress reports of long stages: bars on a terminal, or plain lines."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PART, _BAR = 24, 12  # maximum width of a part's name, and width of its bar, in characters


class Progress:
    """Progress of a stage, one part after another. The base class shows nothing."""

    def start(self, stage: str, total: int | None) -> None:
        """Begin a part; ``stage`` names it in a word or two, and ``total`` is its number of units if known."""

    def advance(self, n: int = 1, **values: float | int | str) -> None:
        """Count ``n`` more units; ``values`` (mean_reward, failures ...) replace earlier values of the same name."""

    def finish(self) -> None:
        """End the current part."""


@contextmanager
def shown() -> Iterator[Progress]:
    """Show the progress of a stage: a live bar on a terminal, plain lines in a file or a pipe."""
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    name = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=_PART)
    )
    figures = TextColumn(
        "{task.fields[figures]}", markup=False, style="dim", table_column=Column(no_wrap=True)
    )
    # Bind the current stream. A console with stderr=True looks up sys.stderr at every write; while a library is muted,
    # that is the stream that redirects to the console, and the console would write to itself forever.
    console = Console(file=sys.stderr)
    with RichProgress(
        name, BarColumn(bar_width=_BAR), figures, console=console, refresh_per_second=5
    ) as bars:
        yield _Bars(bars)


class ProgressLines(Progress):
    """Plain lines on standard error, every ``every_s`` seconds and at the end of each part."""

    def __init__(self, every_s: float = 5.0) -> None:
        self.every_s = every_s
        self.part = ""

    def start(self, stage: str, total: int | None) -> None:
        self.finish()
        self.part = stage
        self.total = total
        self.done = 0
        self.values: dict[str, float | int | str] = {}
        self.began = self.written = time.monotonic()

    def advance(self, n: int = 1, **values: float | int | str) -> None:
        if self.part:
            self.done += n
            self.values.update(values)
            self.show()

    def finish(self) -> None:
        if self.part:
            self.show(ended=True)
        self.part = ""

    def show(self, *, ended: bool = False) -> None:
        if ended or (time.monotonic() - self.written >= self.every_s and self.done != self.total):
            self.written = time.monotonic()
            print(f"{self.part}: {self.figures(ended=ended)}", file=sys.stderr, flush=True)

    def figures(self, *, ended: bool, width: int | None = None) -> str:
        """Format ``12/60, 3.1/s, 0:15 left, mean reward 0.412``, cut to ``width``; ``ended`` shows the duration."""
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
        for name, value in self.values.items():
            if isinstance(value, float):
                figure = f"{value:.3g}"
            elif isinstance(value, int):
                figure = f"{value:,}"
            else:
                figure = visible(value)
            parts.append(f"{name.replace('_', ' ')} {figure}")
        while width is not None and len(parts) > 1 and len(", ".join(parts)) > width:
            parts.pop()
        return ", ".join(parts)


class _Bars(ProgressLines):
    """A live terminal display with one bar per part. A part of unknown length ends with a full bar."""

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


_KEPT = "\n\t\u200c\u200d"
"""Line ends, tabs, and the joiners of Persian and of emoji."""


def visible(value: Any) -> Any:
    """Return text with [U+XXXX] in place of control, text-direction and surrogate characters.

    Return values that are not strings, and safe HTML, unchanged.
    """
    is_markup = hasattr(value, "__html__")
    if not isinstance(value, str) or is_markup or value.isprintable():
        return value
    text = value
    for char in set(value):
        is_space = unicodedata.category(char) == "Zs"
        if not (char.isprintable() or is_space or char in _KEPT):
            text = text.replace(char, f"[U+{ord(char):04X}]")
    return text
