"""``leret recipes``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leret.cli.options import AsJson

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As `leret recipes list` names it.")]

app = typer.Typer(help="The recipes and programs that come with leret.", no_args_is_help=True)


@app.command("list", epilog="Example: leret recipes list")
def list_recipes(as_json: AsJson = False) -> None:
    """Name every shipped recipe and program, with its purpose."""
    from leret.cli.console import facts
    from leret.core import bundled as shipped

    facts({name: shipped.purpose(name) for name in shipped.names()})


@app.command("show", epilog="Example: leret recipes show sampling/demo")
def show(name: NameArgument) -> None:
    """Print a recipe or a program, as it is."""
    from leret.cli.console import say
    from leret.core import bundled as shipped

    say(shipped.find(name, *shipped.FOLDERS).read_text(encoding="utf-8").rstrip())


@app.command("copy", epilog="Example: leret recipes copy sampling/demo mine")
def copy(
    name: NameArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Gets the recipe in its folder.")] = Path(),
) -> None:
    """Copy a recipe, and the programs that it can name, to be edited. Files that exist are kept."""
    from leret.cli.console import say
    from leret.core import bundled as shipped

    written = shipped.copy(name, directory)
    for path in written:
        say(f"wrote {path}")
    if not written:
        say("nothing to do: all of it is there already")
