"""Arguments and flags that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["DryRun", "Overrides", "RecipeArgument", "RunOption"]

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
RunOption = Annotated[Path, typer.Option("--run", metavar="R", help="The run directory.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key: sampling.samples=2. Repeatable.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what it costs; do nothing.")]
