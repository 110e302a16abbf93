"""What building an index tells while it works; `leret.cli.progress` shows it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """Watches one part of a build after another; `leret.sampling.progress.Progress` is the same."""

    def start(self, stage: str, total: int | None) -> None:
        """A part begins; ``total`` is its units of work, where known."""
        ...

    def advance(self, n: int = 1, **facts: float | int | str) -> None:
        """``n`` units more are done."""
        ...

    def finish(self) -> None:
        """The part ended."""
        ...


class Silent:
    """Watches and says nothing."""

    def start(self, stage: str, total: int | None) -> None:
        """Nothing."""

    def advance(self, n: int = 1, **facts: float | int | str) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""
