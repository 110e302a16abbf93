"""``leret serve``."""

from __future__ import annotations

import typer

from leret.cli import serve_retriever

__all__ = ["app"]

app = typer.Typer(help="Serve until it is stopped.", no_args_is_help=True)


@app.callback()
def _serve() -> None:
    """Keeps `retriever` a subcommand while it is the only one."""


app.command("retriever")(serve_retriever.retriever)
