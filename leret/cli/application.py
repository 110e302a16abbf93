"""The application: its commands, its global flags, and what becomes of an error."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

import leret
from leret.cli import (
    data,
    demo,
    eval_retriever,
    evaluate,
    index,
    init,
    loop,
    pretrain,
    recipes,
    sample,
    search,
    serve,
    store,
    train,
)
from leret.cli.ending import ended
from leret.cli.surroundings import prepare

__all__ = ["app"]


class _Application(typer.core.TyperGroup):
    """The root command: every error of a command ends here, as one message and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """``--debug`` is taken wherever it stands."""
        if "--debug" in args:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; see `ended`."""
        with ended(debug=bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Application,
    name="leret",
    help="Teach a DSPy program to search by trying: sample, train on what worked, measure, load it back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"leret {leret.__version__}")
        raise typer.Exit


@app.callback()
def _global(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and what libraries log.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    prepare(debug)


app.command("demo")(demo.demo)
app.command("init")(init.init)
app.command("sample")(sample.sample)
app.command("pairs")(sample.pairs)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("eval-retriever")(eval_retriever.eval_retriever)
app.command("run")(loop.run)
app.command("pretrain")(pretrain.pretrain)
app.add_typer(recipes.app, name="recipes")
app.add_typer(data.app, name="data")
app.add_typer(store.app, name="store")
app.add_typer(serve.app, name="serve")
app.add_typer(index.app, name="index")
app.command("search")(search.search)
