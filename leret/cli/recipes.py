"""``leret recipes``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="The recipes and programs that come with leret.", no_args_is_help=True)


@app.command("list")
def list_recipes() -> None:
    """Name every shipped recipe and program, with its purpose."""
    from leret import shipped
    from leret.cli.console import say

    names = shipped.names()
    width = max(len(name) for name in names)
    for name in names:
        say(f"{name:<{width}}  {shipped.purpose(name)}")


@app.command("copy")
def copy(
    name: Annotated[str, typer.Argument(help="As `leret recipes list` names it.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Gets the recipe in its folder.")] = Path(),
) -> None:
    """Copy a recipe, and the programs that it can name, to be edited. Files that exist are kept."""
    from leret import shipped
    from leret.cli.console import say

    written = shipped.copy(name, directory)
    for path in written:
        say(f"wrote {path}")
    if not written:
        say("nothing to do: all of it is there already")
