"""The command ``python -m models pretrain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leret.cli import console
from leret.cli.app import ended, prepare
from leret.cli.console import Overrides, RecipeArgument
from leret.core.progress import shown

PROGRAM = "python -m models pretrain"

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.command(epilog=f"Example: {PROGRAM} sample.yaml")
def pretrain(
    recipe: RecipeArgument,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Model directory (default: policy.model).")] = None,
    overrides: Overrides = None,
) -> None:
    """Build a small policy from rule-based demonstrations made without gold documents. Run again to resume."""
    from models.pretrain.stage import pretrain as stage

    settings = console.sampling_recipe(recipe, overrides or (), ("policy.model",))
    with shown() as progress:
        path = stage(settings, out, progress=progress)
    console.done(f"policy saved to {path}")


def run(arguments: list[str]) -> None:
    """Run the command. A failure ends the process with one message and the exit code that `leret` would have."""
    debug = "--debug" in arguments
    prepare(debug)
    try:
        with ended(debug=debug):
            app([word for word in arguments if word != "--debug"], prog_name=PROGRAM, standalone_mode=False)
    except typer.Exit as error:
        raise SystemExit(error.exit_code) from None
