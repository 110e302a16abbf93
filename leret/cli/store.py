"""``leret store``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from leret.cli.options import AsJson, RunOption

app = typer.Typer(help="Check and export the samples of a run.", no_args_is_help=True)


@app.command("check", epilog="Example: leret store check --run runs/mine")
def check(run: RunOption, as_json: AsJson = False) -> None:
    """Prove that a store is sound: file, ids, rewards, paths; writes nothing, exits 1 where something is wrong."""
    from leret.cli.console import done, facts
    from leret.core.errors import RunError
    from leret.core.runs import Run
    from leret.sampling.store.check import check_store

    opened = Run.open(run)
    report = check_store(opened)
    facts(report, vars(report) | {"faults": None})
    if report.faults:
        kinds = "one kind of fault" if len(report.faults) == 1 else f"{len(report.faults)} kinds of faults"
        listed = "\n".join(f"  {fault}" for fault in report.faults)
        raise RunError(f"{opened.store} has {kinds}:\n{listed}").failed()
    done(f"{opened.store} is sound")


@app.command("export", epilog="Example: leret store export --run runs/mine --out samples.jsonl")
def export(
    run: RunOption,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to; - is standard output, for jsonl.")],
    to: Annotated[Literal["jsonl", "parquet"], typer.Option(help="The format.")] = "jsonl",
    messages: Annotated[bool, typer.Option("--messages", help="Add the messages of each sample's state.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE where it is there.")] = False,
) -> None:
    """Write one row a sample: question, step, prompt, completion, query, ranking, reward, error."""
    from leret.cli.console import done
    from leret.core.runs import Run
    from leret.sampling.store.export import export_store

    opened = Run.open(run)
    if str(out) == "-":
        export_store(opened, to, sys.stdout, messages=messages)
        return
    n = export_store(opened, to, out, messages=messages, force=force)
    done(f"{n:,} samples in {out}")
