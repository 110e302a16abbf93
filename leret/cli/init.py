"""``leret init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["init"]


def init(
    questions: Annotated[str, typer.Option(metavar="PATH", help="The question file, a BEIR folder, or hf:NAME.")],
    corpus: Annotated[str | None, typer.Option(metavar="PATH", help="The corpus, where it is another file.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="demo, a model directory or a server's URL.", show_default="made from MiniLM")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Of a URL: the served model.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gets sample.yaml and eval.yaml.")] = Path(),
) -> None:
    """Write recipes for your own questions and corpus; the files are checked, and none is overwritten."""
    from leret.cli.console import done, say, warn_of_demo
    from leret.starter import write_starter

    sampling, evaluation = write_starter(questions, corpus, out, policy, model)
    warn_of_demo("", policy or "")
    done(f"wrote {sampling} and {evaluation}")
    for line in sampling.read_text(encoding="utf-8").splitlines():
        if line.startswith("#   "):
            say(line[2:])
