"""The command line: it reads recipes, calls the stages, and shows what they say. Nothing of a stage is here.

Every command imports its stage when it is called, so that ``leret --help`` loads neither torch nor dspy.
"""

from __future__ import annotations

from leret.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """The ``leret`` command."""
    app()
