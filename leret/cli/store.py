"""``leret store``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Check and export the samples of a run.", no_args_is_help=True)

RunArgument = Annotated[Path, typer.Argument(metavar="R", help="The run directory.")]


class Format(StrEnum):
    """What an export is written as."""

    jsonl = "jsonl"
    parquet = "parquet"


@app.command("check")
def check(run: RunArgument) -> None:
    """Prove that a store is sound: file, ids, rewards, paths; writes nothing, exits 1 where something is wrong."""
    from leret.cli.console import done, facts, say
    from leret.errors import RunError
    from leret.runs import Run
    from leret.sampling.check import check_store

    opened = Run.open(run)
    report = check_store(opened)
    facts({name: value for name, value in vars(report).items() if name not in {"faults", "notes"}})
    for note in report.notes:
        say(f"  {note}")
    if report.faults:
        kinds = "one kind of fault" if len(report.faults) == 1 else f"{len(report.faults)} kinds of faults"
        listed = "\n".join(f"  {fault}" for fault in report.faults)
        raise RunError(f"{opened.store} has {kinds}:\n{listed}").failed()
    done(f"{opened.store} is sound")


@app.command("export")
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to; - is standard output, for jsonl.")],
    to: Annotated[Format, typer.Option(help="The format.")] = Format.jsonl,
    messages: Annotated[bool, typer.Option("--messages", help="Add the messages of each sample's state.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE where it is there.")] = False,
) -> None:
    """Write one row a sample: question, step, prompt, completion, query, ranking, reward, error."""
    from leret.cli.console import done
    from leret.runs import Run
    from leret.sampling.export import export_store

    opened = Run.open(run)
    if str(out) == "-":
        export_store(opened, to.value, sys.stdout, messages=messages)
        return
    n = export_store(opened, to.value, out, messages=messages, force=force)
    done(f"{n:,} samples in {out}")
