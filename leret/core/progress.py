"""What a long stage tells while it works; the command line shows it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Watches one part of a stage after another."""

    def start(self, stage: str, total: int | None) -> None:
        """A part begins: what it does, in a word or two, and its units of work, where known."""

    def advance(self, n: int = 1, **facts: float | int | str) -> None:
        """``n`` units more are done; ``facts`` (mean_reward, failures ...) replace those of the same name."""

    def finish(self) -> None:
        """The part ended."""


class Silent:
    """Watches and says nothing."""

    def start(self, stage: str, total: int | None) -> None: ...

    def advance(self, n: int = 1, **facts: float | int | str) -> None: ...

    def finish(self) -> None: ...
