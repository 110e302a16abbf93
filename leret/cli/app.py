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
    pretrain,
    recipes,
    sample,
    search,
    serve,
    store,
    train,
)
from leret.cli import run as loop
from leret.cli.console import as_json
from leret.cli.errors import ended
from leret.cli.process import prepare

_TYPES = {"bool": "", "str": "TEXT", "path": "PATH", "int": "N", "float": "N", "int range": "N", "float range": "N"}
"""Typer's types as help shows them."""


class _Plain:
    """Help in words: no types of typer's, no braces around arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            kind = param.display_type(ctx).strip("<>")
            if isinstance(param, typer.core.TyperArgument):
                param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
            elif param.metavar is None:
                param.metavar = _TYPES.get(kind, kind)
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]


class _Command(_Plain, typer.core.TyperCommand): ...


class _Group(_Plain, typer.core.TyperGroup): ...


class _Application(_Group):
    """The root command: every error of a command ends here, as one message and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """``--debug`` is taken wherever it stands."""
        debug = "--debug" in args
        with ended(debug=debug):
            return super().parse_args(ctx, ["--debug"] * debug + [arg for arg in args if arg != "--debug"])

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
    as_json(False)


_START, _LOOP, _DATA, _SERVING = "Start here", "Loop", "Data and retrieval", "Serving"

for panel, name, function, example in (
    (_START, "demo", demo.demo, "--run runs/demo"),
    (_START, "init", init.init, "--questions questions.jsonl --corpus corpus.jsonl"),
    (_LOOP, "sample", sample.sample, "sampling/demo.yaml --run runs/mine --set data.limit=100"),
    (_LOOP, "pairs", sample.pairs, "--run runs/mine --strategy best-worst"),
    (_LOOP, "train", train.train, "demo-sft --run runs/mine --set num_train_epochs=2"),
    (_LOOP, "eval", evaluate.evaluate, "demo --run runs/mine --set limit=100"),
    (_LOOP, "run", loop.run, "demo demo-sft demo-ipo demo --run runs/mine --rounds 2"),
    (_LOOP, "pretrain", pretrain.pretrain, "sampling/demo.yaml --out policies/mine"),
    (_DATA, "search", search.search, 'indexes/mine "director of Ed Wood" -k 5'),
    (_DATA, "eval-retriever", eval_retriever.eval_retriever, "indexes/mine --questions q.jsonl"),
):
    app.command(name, cls=_Command, rich_help_panel=panel, epilog=f"Example: leret {name} {example}")(function)
for panel, name, group in (
    (_START, "recipes", recipes.app),
    (_LOOP, "store", store.app),
    (_DATA, "data", data.app),
    (_DATA, "index", index.app),
    (_SERVING, "serve", serve.app),
):
    app.add_typer(group, name=name, cls=_Group, rich_help_panel=panel)
    for command in group.registered_commands:
        command.cls = _Command
