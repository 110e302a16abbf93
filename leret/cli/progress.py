"""Progress of a stage: a live bar where somebody watches, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leret.cli.console import plain
from leret.core.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import TaskID


_EVERY_S = 5.0
"""Seconds between two plain lines."""
_NAME, _BAR = 24, 12
"""Columns of a part's name, at most, and of its bar."""


@contextmanager
def shown() -> Iterator[Progress]:
    """The progress that fits the place: live on a terminal, lines in a file or a pipe."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    with Bars.live() as bars:
        yield bars


@dataclass
class _Part:
    """One part of a stage, and how far it is."""

    stage: str
    total: int | None
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    facts: dict[str, float | int | str] = field(default_factory=dict)

    def advance(self, n: int, facts: dict[str, float | int | str]) -> None:
        self.done += n
        self.facts.update(facts)

    def words(self, *, ended: bool, width: int | None = None) -> str:
        """``12/60, 3.1/s, 0:15 left, mean reward 0.412, failures 3``; the time it took once it has ended.

        Args:
            ended: the part has ended.
            width: columns there are; facts that would be cut off are left out.
        """
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
            parts.append(f"{_clock(max(0, self.total - self.done) / rate)} left")
        parts += [f"{name.replace('_', ' ')} {_figure(value)}" for name, value in self.facts.items()]
        while width is not None and len(parts) > 1 and len(", ".join(parts)) > width:
            parts.pop()
        return plain(", ".join(parts))


class Lines:
    """Plain lines on standard error, one every few seconds and one at the end of each part.

    Args:
        every_s: seconds between two lines.
    """

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self.every_s = every_s
        self.spoke = 0.0
        self.part: _Part | None = None

    def start(self, stage: str, total: int | None) -> None:
        """A part begins."""
        self.finish()
        self.part = _Part(stage, total)
        self.spoke = self.part.began

    def advance(self, n: int = 1, **facts: float | int | str) -> None:
        """``n`` units more are done."""
        if self.part is None:
            return
        self.part.advance(n, facts)
        if time.monotonic() - self.spoke >= self.every_s and self.part.done != self.part.total:
            self.spoke = time.monotonic()
            self._speak(self.part, ended=False)

    def finish(self) -> None:
        """The part ended; its last line is always written."""
        if self.part is not None:
            self._speak(self.part, ended=True)
        self.part = None

    def _speak(self, part: _Part, *, ended: bool) -> None:
        print(f"{part.stage}: {part.words(ended=ended)}", file=sys.stderr, flush=True)


class Bars:
    """A live display on a terminal, one bar a part.

    Args:
        bars: Rich's own, already live.
    """

    def __init__(self, bars: RichBars) -> None:
        self.bars = bars
        self.part: _Part | None = None
        self.task: TaskID | None = None

    @classmethod
    @contextmanager
    def live(cls) -> Iterator[Bars]:
        """A display that is taken down at the end, whatever happens."""
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichBars
        from rich.table import Column

        what = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=_NAME))
        told = TextColumn("{task.fields[told]}", markup=False, style="dim", table_column=Column(no_wrap=True))
        # The stream of now: a console with stderr=True would look sys.stderr up at every write, find what redirects it
        # while a library is muted, and write to itself for ever.
        console = Console(file=sys.stderr)
        with RichBars(what, BarColumn(bar_width=_BAR), told, console=console, refresh_per_second=5) as bars:
            yield cls(bars)

    def start(self, stage: str, total: int | None) -> None:
        """A part begins."""
        self.finish()
        self.part = _Part(stage, total)
        self.task = self.bars.add_task(stage, total=total, told="")

    def advance(self, n: int = 1, **facts: float | int | str) -> None:
        """``n`` units more are done."""
        if self.part is None or self.task is None:
            return
        self.part.advance(n, facts)
        self.bars.update(self.task, advance=n, told=self._words(self.part, ended=False))

    def finish(self) -> None:
        """The part ended; its bar stays, and is full where nobody knew how long it would be."""
        if self.part is not None and self.task is not None:
            total = self.part.total if self.part.total is not None else max(1, self.part.done)
            done = self.part.done if self.part.total is not None else total
            self.bars.update(self.task, total=total, completed=done, told=self._words(self.part, ended=True))
            self.bars.stop_task(self.task)
        self.part = self.task = None

    def _words(self, part: _Part, *, ended: bool) -> str:
        return part.words(ended=ended, width=self.bars.console.width - _NAME - _BAR - 2)


def _figure(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
